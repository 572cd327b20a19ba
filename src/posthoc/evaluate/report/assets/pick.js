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
