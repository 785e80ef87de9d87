import io
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.labels.files import SUFFIXES
from tests.support.messages.pictures import png_header, without_middle
from tests.support.pictures import smooth_picture, write_image

PICTURE = smooth_picture(24, 40)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def refusal(path: Path, read: Callable[[str], object] = check_image) -> str:
    """Why an image is left out; empty if it is not."""
    try:
        read(str(path))
    except UnreadableImageError as error:
        return str(error)
    return ""


def test_every_format_is_read_as_pillow_reads_it(tmp_path: Path) -> None:
    for suffix in sorted(SUFFIXES - {".dng", ".pfm"}):
        path = save(tmp_path / f"a{suffix}", Image.fromarray(PICTURE))
        image = read_image(str(path))
        assert image.dtype == np.uint8, suffix
        with Image.open(path) as file:
            assert np.array_equal(image, np.array(file.convert("RGB"))), suffix
        assert check_image(str(path)) == (24, 40), suffix


def test_upper_case_suffixes_and_wrong_ones_do_not_matter(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.fromarray(PICTURE)).rename(tmp_path / "a.JPG")
    assert np.array_equal(read_image(str(path)), PICTURE)
    assert check_image(str(path)) == (24, 40)


def test_images_are_upright_for_every_exif_orientation(tmp_path: Path) -> None:
    for suffix, orientation in product(("jpg", "png", "tiff", "webp", "mpo", "avif"), range(1, 9)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = save(tmp_path / f"{orientation}.{suffix}", Image.fromarray(PICTURE), exif=exif)
        with Image.open(path) as file:
            upright = np.array(ImageOps.exif_transpose(file).convert("RGB"))
        assert np.array_equal(read_image(str(path)), upright), (suffix, orientation)
        shape = (24, 40) if orientation < 5 else (40, 24)
        assert check_image(str(path)) == upright.shape[:2] == shape, (suffix, orientation)


def test_a_reduced_jpeg_is_the_whole_one_at_a_smaller_size(tmp_path: Path) -> None:
    """What is seen is what area averaging sees, upright and in colour. Files of other formats stay as they are."""
    picture = Image.fromarray(smooth_picture(304, 400))
    png = save(tmp_path / "a.png", picture)
    for orientation, reduction in product((1, 3, 6), (2, 4, 8)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        jpeg = save(tmp_path / f"{orientation} {reduction}.jpg", picture, quality=95, exif=exif)
        whole, part = read_image(str(jpeg)), read_image(str(jpeg), reduction)
        averaged = cv2.resize(whole, None, fx=1 / reduction, fy=1 / reduction, interpolation=cv2.INTER_AREA)
        assert part.shape == averaged.shape, (orientation, reduction)
        assert np.abs(part.astype(int) - averaged).mean() < 1, (orientation, reduction)
        assert np.array_equal(read_image(str(png), reduction), read_image(str(png))), (orientation, reduction)


def test_grey_alpha_palette_and_print_colours_become_rgb(tmp_path: Path) -> None:
    for mode, suffix in [
        ("L", "png"), ("L", "jpg"), ("LA", "png"), ("RGBA", "png"), ("RGBA", "webp"), ("P", "png"), ("1", "png"),
        ("CMYK", "jpg"), ("CMYK", "tiff"), ("L", "tiff"), ("RGBA", "tiff"),
    ]:
        path = save(tmp_path / f"{mode}.{suffix}", Image.fromarray(PICTURE).convert(mode))
        with Image.open(path) as file:
            expected = np.array(file.convert("RGB")).astype(int)
        assert np.abs(read_image(str(path)) - expected).max() <= 1, (mode, suffix)
        assert check_image(str(path)) == (24, 40), (mode, suffix)


@pytest.mark.parametrize("comment", [b"", b"# by hand\n#\n"])
@pytest.mark.parametrize("white", [1, 15, 100, 255])
def test_the_white_of_a_binary_pnm_is_the_one_of_its_header(tmp_path: Path, white: int, comment: bytes) -> None:
    """The same picture as text, which Pillow scales, is the oracle."""
    levels = [number * white // (12 * 16 - 1) for number in range(12 * 16)]
    header = b"\n" + comment + b"16 " + comment + b"12\n%d\n" % white
    binary, text = tmp_path / "binary.pgm", tmp_path / "text.pgm"
    binary.write_bytes(b"P5" + header + bytes(levels))
    text.write_bytes(b"P2" + header + " ".join(map(str, levels)).encode())
    expected = np.array(Image.open(text).convert("L"))
    assert np.array_equal(read_image(str(binary))[..., 0], expected)
    assert expected.max() == 255
    assert check_image(str(binary)) == (12, 16)


def test_a_padded_header_is_read_in_linear_time(tmp_path: Path) -> None:
    padded = tmp_path / "padded.pgm"
    padded.write_bytes(b"P5" + b" " * 1000 + b"x")
    with pytest.raises(UnreadableImageError):
        read_image(str(padded))


def test_sixteen_bits_keep_their_upper_eight(tmp_path: Path) -> None:
    deep = PICTURE.astype(np.uint16) * 257
    for suffix, channels in product(("png", "tiff"), (1, 3)):
        path = write_image(tmp_path / f"{channels}.{suffix}", deep if channels == 3 else deep[..., 0])
        expected = PICTURE if channels == 3 else np.repeat(PICTURE[..., :1], 3, axis=2)
        assert np.array_equal(read_image(str(path)), expected), (suffix, channels)
        assert check_image(str(path)) == (24, 40), (suffix, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_floats_from_zero_to_one_become_levels(tmp_path: Path, channels: int) -> None:
    floats = PICTURE.astype(np.float32) / 255
    path = write_image(tmp_path / "a.pfm", floats if channels == 3 else floats[..., 0])
    expected = PICTURE if channels == 3 else np.repeat(PICTURE[..., :1], 3, axis=2)
    assert np.abs(read_image(str(path)).astype(int) - expected).max() <= 1
    assert check_image(str(path)) == (24, 40)


def whole(suffix: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(smooth_picture(120, 160)).save(buffer, suffix)
    return buffer.getvalue()


def test_a_file_that_ends_early_is_left_out(tmp_path: Path) -> None:
    for suffix, share in product(("jpeg", "png", "bmp", "webp", "tiff"), (0.0, 0.02, 0.3, 0.6, 0.9)):
        content = whole(suffix)
        path = tmp_path / f"{share}.{suffix}"
        path.write_bytes(content[:int(len(content) * share)])
        assert refusal(path), (suffix, share)


@pytest.mark.parametrize("kind", ["eps", "tga", "pcx", "ico", "dds"])
def test_other_formats_are_refused_unopened(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    save(tmp_path / f"a.{kind}", Image.fromarray(PICTURE)).rename(tmp_path / "a.jpg")
    monkeypatch.setattr("subprocess.Popen", None)  # EPS is drawn by a program
    with pytest.raises(UnreadableImageError):
        check_image(str(tmp_path / "a.jpg"))
    with pytest.raises(UnreadableImageError):
        read_image(str(tmp_path / "a.jpg"))


def test_decoders_do_not_write_to_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pfm").write_bytes(b"PF\n64 48\n-1.0\n")
    with pytest.raises(UnreadableImageError):
        check_image(str(tmp_path / "a.pfm"))
    assert capfd.readouterr() == ("", "")


def test_bytes_after_a_jpegs_end_do_no_harm(tmp_path: Path) -> None:
    content = whole("jpeg")
    path = tmp_path / "a.jpg"
    path.write_bytes(content[:-2])
    with pytest.raises(UnreadableImageError):
        check_image(str(path))
    for tail in (b"\0" * 300, b"\0" * 3, b"some camera's notes"):
        path.write_bytes(content + tail)
        assert check_image(str(path)) == read_image(str(path)).shape[:2] == (120, 160)


def test_a_png_with_a_flipped_bit_is_left_out(tmp_path: Path) -> None:
    content = bytearray(whole("png"))
    content[len(content) // 2] ^= 1
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UnreadableImageError):
        check_image(str(tmp_path / "a.png"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    contents = (b"not a picture", b"\xff\xd8\xff\xe0junk\xff\xd9", b"BM", b"<svg/>", b"\0" * 5000)
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(content)
        assert refusal(path), content
        assert refusal(path, read_image), content


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (20_000, 10_000)])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int,
                                                       height: int) -> None:
    (tmp_path / "a.png").write_bytes(png_header(width, height))
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(UnreadableImageError):
        check_image(str(tmp_path / "a.png"))


def test_a_side_below_ten_pixels_is_left_out(tmp_path: Path) -> None:
    for size, usable in (((10, 10), True), ((9, 100), False), ((100, 9), False), ((1, 1), False)):
        path = write_image(tmp_path / "{}x{}.png".format(*size), np.zeros((*size, 3), np.uint8))
        if usable:
            assert check_image(str(path)) == size, size
        else:
            assert refusal(path), size


def test_a_jpeg_with_a_grey_end_is_refused(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    ways: tuple[dict[str, int], ...] = ({}, {"subsampling": 0}, {"restart_marker_rows": 1})
    for (number, options), mode in product(enumerate(ways), ("RGB", "L", "CMYK")):
        path = tmp_path / f"{mode}{number}.jpg"
        save(path, Image.fromarray(smooth_picture(96, 128)).convert(mode), exif=exif, **options)
        whole = path.read_bytes()
        assert check_image(str(path)) == (128, 96), (options, mode)
        for share in (0.1, 0.3, 0.6, 0.9):
            path.write_bytes(without_middle(whole, share))
            assert refusal(path), (options, mode, share)
            path.write_bytes(path.read_bytes() + b"notes\xff\xd9")
            assert refusal(path), (options, mode, share)


def test_a_jpeg_without_its_end_marker_is_refused(tmp_path: Path) -> None:
    """Zeros in the place of missing data are data too; the header may have a preview with an end marker."""
    grey_end = smooth_picture(64, 96).copy()
    grey_end[48:] = 128
    loud = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    for (name, picture), comment in product({"grey": grey_end, "loud": loud}.items(), (b"", b"\xff\xda\xff\xd9")):
        path = save(tmp_path / f"{name}.jpg", Image.fromarray(picture), quality=90, comment=comment)
        whole = path.read_bytes()
        assert not refusal(path), name
        path.write_bytes(whole + bytes(64))
        assert not refusal(path), name
        path.write_bytes(whole[:-2] + bytes(64))
        assert refusal(path), name
        path.write_bytes(whole[:len(whole) // 2] + bytes(len(whole) // 2))
        assert refusal(path), name


def test_damaged_bytes_of_an_avif_are_a_reason(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.avif", Image.fromarray(smooth_picture(64, 96))).read_bytes()
    for place in range(len(whole) // 2, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 255
        (tmp_path / "a.avif").write_bytes(damaged)
        assert refusal(tmp_path / "a.avif") == refusal(tmp_path / "a.avif", read_image), place


@pytest.mark.parametrize("progressive", [False, True])
def test_a_grey_image_does_not_count_as_truncated(tmp_path: Path, progressive: bool) -> None:
    picture = smooth_picture(96, 128).copy()
    picture[48:] = 128
    path = save(tmp_path / "a.jpg", Image.fromarray(picture), progressive=progressive)
    assert (read_image(str(path))[-1, -1] == 128).all()
    assert check_image(str(path)) == (96, 128)


@pytest.mark.filterwarnings("ignore:(Truncated File Read|Corrupt EXIF)")
@pytest.mark.parametrize("suffix", ["jpg", "mpo", "webp"])
def test_an_orientation_of_another_type_has_the_decoders_meaning(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    for order, kind, value in product("<>", range(13), ("H2x", "2xH", "B3x")):
        entry = struct.pack(f"{order}HHI{value}", 0x0112, kind, 1, 6)
        mark = b"II*\0" if order == "<" else b"MM\0*"
        exif = b"Exif\0\0" + mark + struct.pack(f"{order}IH", 8, 1) + entry + bytes(4)
        Image.fromarray(smooth_picture(24, 40)).save(path, exif=exif)
        assert check_image(str(path)) == read_image(str(path)).shape[:2], (order, kind, value)
    Image.fromarray(smooth_picture(24, 40)).save(path, exif=exif[:-6])
    assert check_image(str(path)) == read_image(str(path)).shape[:2]


@pytest.mark.parametrize("suffix", ["jpg", "webp"])
def test_an_orientation_in_xmp_alone_turns_nothing(tmp_path: Path, suffix: str) -> None:
    """As in browsers, where the labels were drawn. The size and the pixels are those of the same picture."""
    xmp = (b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
           b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>')
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(smooth_picture(24, 40)).save(path, xmp=xmp)
    with Image.open(path) as file:
        assert file.getexif().get(0x0112) == 6  # Pillow takes it for EXIF's
    assert check_image(str(path)) == read_image(str(path)).shape[:2] == (24, 40)
