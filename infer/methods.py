"""Lists the decoding methods, their parts, and where each comes from.

python infer/methods.py
"""

from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

CONF = Path(__file__).resolve().parents[1] / "conf" / "method"


def described(file: Path) -> tuple[str, str]:
    """What a config's opening comment says: the text up to `Source:`, and the source."""
    lines = file.read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text, _, source = " ".join(comment).partition("Source: ")
    return text.strip(), source.strip()


def parts(file: Path) -> dict[str, str]:
    """The block and commit rule that a method config is composed of."""
    return {k: v for entry in OmegaConf.load(file).defaults if not isinstance(entry, str) for k, v in entry.items()}


def main() -> None:
    console = Console()
    if console.width < 110:  # a pipe has 80 columns, in which names would be cut
        console = Console(width=110)
    methods = Table(title="Methods")
    for title in ("method=", "method/block=", "method/commit="):
        methods.add_column(title, no_wrap=True)
    methods.add_column("what it does")
    methods.add_column("source")
    for file in sorted(CONF.glob("*.yaml")):
        composed = parts(file)
        methods.add_row(file.stem, composed["block"], composed["commit"], *described(file))
    console.print(methods)
    for group in ("block", "commit", "filters"):
        table = Table(title=f"Parts: {group}")
        table.add_column(f"method/{group}=", no_wrap=True)
        table.add_column("what it does")
        table.add_column("source")
        for file in sorted((CONF / group).glob("*.yaml")):
            table.add_row(file.stem, *described(file))
        console.print(table)
    console.print(
        "Parts cross freely: method=local_leap method/block=lbs 'method/filters=[dilated_spacing]' method.cache=dual\n"
        "The settings of each are in conf/method/; override them as method.commit.tau=0.8.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
