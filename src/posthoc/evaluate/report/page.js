// Tables sort by a click on a heading, or Enter or Space on it: the better end first, then the other way round.
"use strict";
document.querySelectorAll("table.figures").forEach((table) => {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const numeric = head.dataset.kind === "number";
    const value = (row) => {
      const written = row.cells[column].dataset.v;
      return numeric && written !== "" ? Number(written) : written;
    };
    head.querySelector("button").addEventListener("click", () => {
      const other = { ascending: "descending", descending: "ascending" };
      const way = other[head.getAttribute("aria-sort")] || head.dataset.first;
      const sign = way === "ascending" ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays last
        return x < y ? -sign : x > y ? sign : 0;
      });
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way);
      body.append(...rows);
    });
  });
});
// A method picked in a legend is brought out in every chart of its experiment; and paper shows what is folded away.
"use strict";
document.querySelectorAll("section.experiment").forEach((section) => {
  const buttons = section.querySelectorAll(".legend button");
  buttons.forEach((button) =>
    button.addEventListener("click", () => {
      const method = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.m;
      buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.m === method)));
      section.querySelectorAll(".series").forEach((line) => {
        line.classList.toggle("faint", method !== null && line.dataset.m !== method);
        line.classList.toggle("picked", line.dataset.m === method);
      });
    })
  );
});
addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((folded) => {
    folded.open = true;
    folded.dataset.folded = "";
  });
});
addEventListener("afterprint", () => {
  document.querySelectorAll("details[data-folded]").forEach((folded) => {
    folded.open = false;
    delete folded.dataset.folded;
  });
});
