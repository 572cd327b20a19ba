"""Changed views of images, and the warning that asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, DataError, OptionError, Outputs, PosthocWarning, Temperature
from posthoc.collect.augmentation import AREA, Augmented, random_crops
from posthoc.collect.data_warnings import warn_if_memorized
from tests.cases import seeded


def ramp(n: int = 64, size: int = 16) -> torch.Tensor:
    """Images whose two channels say where a pixel is: across and down, from -1 to 1 at the centers of the pixels."""
    at = (2.0 * torch.arange(size) + 1.0) / size - 1.0
    return torch.stack(torch.meshgrid(at, at, indexing="xy")).expand(n, 2, size, size).clone()


def test_crops_show_a_part_of_each_image_within_it():
    views = random_crops(ramp(500), seeded(0))
    inner = views[:, :, 1:-1, 1:-1]  # the outermost pixels are blends with what is beyond
    steps = torch.stack([inner[:, 0].mT, inner[:, 1]]).diff(dim=-2)
    torch.testing.assert_close(steps, steps[..., :1, :1].expand_as(steps), rtol=1e-3, atol=1e-4)  # straight, even
    area = (steps[..., 0, 0] / (2.0 / 16)).prod(0)
    assert float(area.min()) >= AREA[0] - 0.11  # a side that is cut at the whole image takes area away
    assert float(area.max()) <= 1.0 + 1e-4
    assert float(area.std()) > 0.05
    assert float(inner.abs().max()) <= 1.0
    assert not torch.equal(views[0], views[1])


def test_views_are_the_same_for_the_same_seed_and_new_in_every_pass():
    data, again = (Augmented((ramp(), torch.zeros(64)), "crops", size=50) for _ in range(2))
    first, second = ([x for x, _ in data] for _ in range(2))
    assert [len(x) for x in first] == [50, 14]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(next(iter(again))[0], first[0])


def test_batches_of_every_kind_keep_all_but_their_images():
    flip = lambda images: images.flip(-1)  # noqa: E731
    x, y = ramp(6), torch.arange(6)
    images, labels = map(torch.cat, zip(*Augmented(DataLoader(TensorDataset(x, y), batch_size=4), flip), strict=True))
    named = next(iter(Augmented({"pixel_values": x.numpy(), "labels": y}, flip)))
    ((pair, paired),) = Augmented([({"pixel_values": x}, y)], flip)
    (bare,) = Augmented(x, flip)
    assert all(torch.equal(x.flip(-1), found) for found in (images, named["pixel_values"], pair["pixel_values"], bare))
    assert all(torch.equal(y, targets) for targets in (labels, named["labels"], paired))


def test_what_is_no_image_and_bad_requests_are_refused():
    y, image = torch.zeros(5), torch.zeros(5, 1, 8, 8)
    for data, message in (
        ((torch.randn(5, 4), y), r"shape \(N, channels, height, width\) in every batch to augment, got 0"),
        ((np.zeros((5, 3, 8, 8), np.uint8), y), "as real numbers, as the network takes them"),
        ({"a": image, "b": image}, "Expected one array of images .*got 2"),
        ([("a name", y)], "got 0"),
    ):
        with pytest.raises(DataError, match=message):
            list(Augmented(data, "crops"))
    with pytest.raises(OptionError, match='Expected augment="crops" or a function'):
        Augmented((ramp(), torch.zeros(64)), "flips")
    with pytest.raises(DataError, match="give images, not its outputs"):
        FMGP(None, "classification").fit(Outputs(torch.randn(5, 3), torch.zeros(5)), augment="crops")


class Memory(nn.Module):
    """Knows the images it was trained on, one of them a row, and guesses at any others."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.images, self.labels, self.last = images.flatten(1), labels, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.flatten(1), self.images).argmin(1)
        sure = nn.functional.one_hot(self.labels[nearest], 2) * 2.0 - 1.0
        return 5.0 * sure + 0.0 * self.last(sure)


def test_memorized_data_are_warned_of_and_views_of_them_are_not():
    g = seeded(0)
    x, y = torch.randn(600, 1, 6, 6, generator=g), torch.randint(2, (600,), generator=g)
    network = Memory(x, y)
    with pytest.warns(PosthocWarning, match='right on 100.0% of them, with a mean loss of 4.5e-05.*augment="crops"'):
        seen = FMGP(network, "classification", steps=5, num_inducing=5).fit((x, y))
    views = FMGP(network, "classification", steps=5, num_inducing=5).fit((x, y), augment="crops")
    assert float(views.predict(x).probs.max()) < float(seen.predict(x).probs.max()) - 0.05
    with pytest.warns(PosthocWarning, match="seems to have seen these data"), pytest.warns(PosthocWarning, match="all"):
        Temperature(network, "classification").fit((x, y))


def test_errors_that_are_much_smaller_than_on_validation_data_are_warned_of():
    g = seeded(0)
    f, noise = torch.randn(600, generator=g), torch.randn(600, generator=g)
    train, val = Outputs(f, f + 0.1 * noise), Outputs(f, f + noise)
    with pytest.warns(PosthocWarning, match=r"mean error is 0\.\d+ here and (1|0\.9)"):
        warn_if_memorized(train, val, "regression")
    warn_if_memorized(val, val, "regression")
    warn_if_memorized(train, None, "regression")
    y = torch.randint(3, (600,), generator=g)
    good = Outputs(2.0 * nn.functional.one_hot(y, 3).float(), y)
    bad = Outputs(2.0 * nn.functional.one_hot((y + (torch.arange(600) % 2)) % 3, 3).float(), y)
    with pytest.warns(PosthocWarning, match="on the validation data"):
        warn_if_memorized(good, bad, "classification")
    warn_if_memorized(bad, good, "classification")
    warn_if_memorized(good[:400], bad, "classification")
