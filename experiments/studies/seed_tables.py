"""Tables of docs/studies/fine_tuning.md, of the records of fine_tuning_seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from studies import RECORDS
from studies.record import Cell, StudyRecord
from table import markdown, number

NOT_RUN = ["This has not run."]
STUDY = "fine_tuning_seeds"
EXACT = "exact"
FEW_STEPS = 20  # left out of a mean of norms
SHOWN = ("answers", "an eighth", "plain text")  # arms whose gradients and optimizer the page shows; records have all
SHOWN_STEPS = ("10", "50")


def records() -> list[StudyRecord]:
    """One of each part."""
    return [StudyRecord(STUDY, path) for path in sorted(RECORDS.glob(f"{STUDY}*.json.xz"))]


def cells() -> dict[tuple[str, str, str], dict[int, Cell]]:
    """Model, arm and head, to the runs of the seeds."""
    found: dict[tuple[str, str, str], dict[int, Cell]] = {}
    for key, cell in ((key, record.ok(key)) for record in records() for key in record.cells):
        model, _, rest = key.partition("/")
        if cell is not None and model != "start":
            arm, head, seed = rest.split("/")
            found.setdefault((model, arm, head), {})[int(seed.removeprefix("seed "))] = cell
    order = ("full", "small")
    return {key: dict(sorted(found[key].items())) for key in sorted(found, key=lambda key: order.index(key[0]))}


def shown() -> dict[tuple[str, str, str], dict[int, Cell]]:
    return {key: seeds for key, seeds in cells().items() if key[1] in SHOWN}


def differences(one: dict[int, Cell], other: dict[int, Cell], part: int) -> list[float]:
    """Differences of held-out losses after, seed by seed."""
    return [one[seed]["held_out"][1][part] - other[seed]["held_out"][1][part] for seed in one if seed in other]


def with_error(values: list[float]) -> str:
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.4f}{error}"


def mean_norm(cell: Cell) -> float:
    norms = cell["grad_norms"]
    return statistics.mean(norms[FEW_STEPS:] or norms)


def runs() -> list[str]:
    found = cells()
    lines = []
    for (model, arm, head), seeds in found.items():
        # an arm of exact gradients alone stands beside the study's own
        exact = found.get((model, arm, EXACT), {})
        base = exact if head != EXACT else found.get((model, "answers", EXACT), {}) if "rate" in arm else {}
        line = [model, arm, head, f"{statistics.mean(c['supervised'] for c in seeds.values()):,.0f}"]
        line += [f"{statistics.mean(c['held_out'][1][0] for c in seeds.values()):.4f}"]
        line += [" ".join(f"{d:+.3f}" for d in differences(seeds, base, 0)) or "-"]
        line += [with_error(differences(seeds, base, part)) for part in (0, 1)]
        ratios = [mean_norm(seeds[seed]) / mean_norm(base[seed]) for seed in seeds if seed in base]
        line += [number(statistics.mean(ratios) if ratios else None, ".3f")]
        line += [f"{statistics.mean(c['clipped'] for c in seeds.values()):.0%}"]
        lines.append(line)
    head = ["model", "arm", "gradient", "labels a step", "held-out loss after", "minus exact, a seed each", "mean"]
    head += ["in unused tokens", "norm of the gradient, x exact", "steps clipped"]
    return [*markdown(head, lines), "", *about()] if lines else NOT_RUN


def about() -> Iterator[str]:
    lines = dict.fromkeys(line for record in records() for line in record.about(compared=False))
    yield from (f"- {line}" for line in lines)


def noise() -> list[str]:
    """How far a draw is from the exact gradient, where the first exact run starts and ends."""
    lines = []
    for (model, arm, _), seeds in shown().items():
        for when, rows in next((c["noise"] for c in seeds.values() if "noise" in c), {}).items():
            for name, row in rows.items():
                if name != "norms":
                    sizes = [number(row[group], ".2%") for group in rows["norms"]]
                    lines.append([model, arm, when, name, *sizes, number(row["norm"], ".4f")])
    head = ["model", "arm", "at its", "gradient", "hidden states", "layers", "head's used rows", "other rows"]
    return markdown([*head, "norm, x exact"], lines) if lines else NOT_RUN


def adam() -> list[str]:
    """Mean size of Adam's steps in parts of the rate, and the share of weights that move."""
    lines = []
    for (model, arm, head), seeds in shown().items():
        steps = next(iter(seeds.values()))["adam"]
        for step in [step for step in SHOWN_STEPS if step in steps] or steps:
            looks = [cell["adam"][step] for cell in seeds.values()]
            line = [model, arm, head, step]
            for group in looks[0]:
                size, moved = (statistics.mean(look[group][i] for look in looks) for i in (0, 1))
                line.append(f"{size:.3f} ({moved:.0%})")
            lines.append(line)
    head = ["model", "arm", "gradient", "step", "layers", "head's used rows", "other rows"]
    return markdown(head, lines) if lines else NOT_RUN


TABLES = {"fine-tuning-seeds": runs, "fine-tuning-noise": noise, "fine-tuning-adam": adam}
