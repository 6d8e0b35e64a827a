"""Draw all 19 corruptions at all 5 severities of one image as a PNG; needs Pillow.

    python scripts/corruption_sheet.py sheet.png
    python scripts/corruption_sheet.py sheet.png --image cat.jpg --side 64 --seed 1

The first column is the clean image: a drawn landscape, or the middle of the picture that is given.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt

GAP, TEXT, ROW_NAME = 4, 14, 130  # pixels


def main() -> None:
    """Read the command line, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path, help="the PNG to write")
    parser.add_argument("--image", type=Path, help="a picture; without it, a landscape is drawn")
    parser.add_argument("--side", type=int, default=32, help="pixels of the image's side (32)")
    parser.add_argument("--zoom", type=int, default=3, help="size of a pixel on the sheet (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    arguments = parser.parse_args()
    clean = landscape(arguments.side) if arguments.image is None else read(arguments.image, arguments.side)
    draw(clean, arguments.zoom, arguments.seed, arguments.output)
    print(f"{arguments.output}: {len(CORRUPTIONS)} corruptions at {len(SEVERITIES)} severities")


def landscape(side: int) -> Tensor:
    """Sky, sun, hill and a house with a red roof.  [3, side, side], uint8"""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    picture = torch.stack([0.45 + 0.4 * y, 0.65 + 0.2 * y, 0.95 - 0.1 * y])

    def paint(where: Tensor, red: float, green: float, blue: float) -> None:
        colour = torch.tensor([red, green, blue])[:, None, None]
        picture.copy_(torch.where(where, colour, picture))

    paint((x - 0.8) ** 2 + (y - 0.2) ** 2 < 0.012, 1.0, 0.9, 0.4)
    paint(y > 0.72 - 0.12 * torch.sin(3 * x), 0.25, 0.55, 0.2)
    paint((x > 0.25) & (x < 0.55) & (y > 0.45) & (y < 0.8), 0.85, 0.8, 0.7)
    paint((y > 0.28) & (y < 0.47) & ((x - 0.4).abs() < 1.1 * (y - 0.28)), 0.7, 0.15, 0.1)
    paint((x > 0.37) & (x < 0.45) & (y > 0.6) & (y < 0.8), 0.3, 0.2, 0.1)
    return (picture * 255).round().to(torch.uint8)


def read(path: Path, side: int) -> Tensor:
    """The middle square of a picture, scaled.  [3, side, side], uint8"""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        square = ImageOps.fit(opened.convert("RGB"), (side, side))
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    return pixels.reshape(side, side, 3).permute(2, 0, 1).contiguous()


def draw(clean: Tensor, zoom: int, seed: int, output: Path) -> None:
    """One row for each corruption: its name, the clean image, severities 1 to 5."""
    from PIL import Image, ImageDraw

    cell = clean.shape[-1] * zoom + GAP
    columns = ["clean", *(f"severity {severity}" for severity in SEVERITIES)]
    sheet = Image.new("RGB", (ROW_NAME + len(columns) * cell, TEXT + len(CORRUPTIONS) * cell), "white")
    pen = ImageDraw.Draw(sheet)
    for column, title in enumerate(columns):
        pen.text((ROW_NAME + column * cell, 1), title, fill="black")
    for row, name in enumerate(CORRUPTIONS):
        top = TEXT + row * cell
        pen.text((GAP, top + cell // 2 - TEXT // 2), name, fill="black")
        shown = [clean, *(corrupt(clean[None], name, severity, seed=seed)[0] for severity in SEVERITIES)]
        for column, image in enumerate(shown):
            large = image.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
            tile = Image.fromarray(large.permute(1, 2, 0).contiguous().numpy())
            sheet.paste(tile, (ROW_NAME + column * cell, top))
    sheet.save(output, format="PNG")


if __name__ == "__main__":
    main()
