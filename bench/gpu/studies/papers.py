"""Tables of docs/studies/papers.md: published figures beside ours, of the grids' record and earlier ones."""

from __future__ import annotations

import functools

from record import Record, Row, load
from shapes import BY_NAME, Shape
from studies.figures import BLOG_TABLE, CCE_TABLE, CHUNKS_TABLE, NVIDIA_TABLE, Method
from studies.records import ROOT, study
from table import markdown, number

EARLIER = ("heads-2026-11-22", "products-2026-11-23")  # of bench/records, which have some of the shapes
MIB = 1 << 20
BEST = "logitless unlimited"
OURS = (BEST, "logitless 2560 MiB", "logitless 160 MiB", "logitless thinned 2^-9")
PEERS = ("torch.compile", "canonical", "apple cce", "apple cce_kahan_full_c", "apple cce_exact")
METHODS = (*OURS, *PEERS, "liger", "liger fp32", "fla")


@functools.cache
def earlier(name: str) -> Record:
    return load(str(ROOT / "bench" / "records" / f"{name}.json"))


class Measured:
    """Rows of one shape, and in ``sources`` where those that a table looked up are from: of the grids' record; what is
    not measured there, of earlier runs of single heads; a row that failed where nobody measured it."""

    def __init__(self, grid: str, shape: Shape) -> None:
        record = study("grids")
        cell = record.cells[f"{grid}/{shape.name}"]
        self.product_ms: float = cell["gemms"][0]["burst"]["logits"]
        parts = [(f"grids, {record.sessions[cell['session']]['date']}", [Row(**row) for row in cell["rows"]])]
        for name in EARLIER if grid != "cce-ignored" else ():
            same = [other.name for other in earlier(name).shapes if other[1:] == shape[1:]]
            parts.append((name, [row for row in earlier(name).rows if row.shape in same]))
        self.rows: dict[tuple[str, str], tuple[Row, str]] = {}
        self.sources: dict[str, None] = {}
        for good in (True, False):
            for source, rows in parts:
                for row in (row for row in rows if (row.status == "ok") == good):
                    self.rows.setdefault((row.method, row.pass_), (row, source))

    def found(self, method: str, pass_: str) -> tuple[Row | None, str]:
        name = "logitless loss" if pass_ == "loss" and method in OURS[:3] else method
        row, source = self.rows.get((name, pass_), (None, ""))
        if row is not None:
            self.sources[source] = None
        return row, source

    def ms(self, method: str, pass_: str) -> float | None:
        row, _ = self.found(method, pass_)
        return row.burst_ms if row is not None else None

    def pair(self, one: tuple[str, str], other: tuple[str, str]) -> tuple[float | None, float | None]:
        """Two times of one run."""
        (row, where), (second, there) = self.found(*one), self.found(*other)
        if row is None or second is None or where != there:
            return None, None
        return row.burst_ms, second.burst_ms

    def ratio(self, method: str, pass_: str) -> str:
        """To eager PyTorch's time."""
        return _ratio(*self.pair((method, pass_), ("canonical", pass_)))

    def mib(self, method: str, pass_: str) -> float | None:
        """Beyond inputs and gradients."""
        row, _ = self.found(method, pass_)
        return None if row is None or row.extra_mib is None else row.extra_mib - row.gradient_mib

    def time(self, method: str, pass_: str) -> str:
        row, _ = self.found(method, pass_)
        return "-" if row is None else number(row.burst_ms) if row.status == "ok" else row.status


def _ratio(a: float | None, b: float | None) -> str:
    return number(a / b if a is not None and b else None)


def _with_sources(lines: list[str], *found: Measured) -> list[str]:
    names = dict.fromkeys(source for item in found for source in item.sources)
    warning = " Times of different runs compare less well than those of one." if len(names) > 1 else ""
    return [*lines, "", f"Measured: {', '.join(names)}.{warning}"]


def _methods(grid: str, shape: Shape, published: dict[str, Method]) -> list[str]:
    """A row a method: what was published, then ours: loss, gradient (both minus loss), both, and memory."""
    head = "method | published: loss, ms | both, ms | loss, MB | both, MB | "
    head += "measured: loss, ms | gradient, ms * | both, ms | loss, MiB | both, MiB beyond gradients"
    found, lines = Measured(grid, shape), []
    for method in METHODS:
        cells = ["", "", "", ""]
        if method in published:
            cells = [number(value, form) for value, form in zip(published[method], ("g", "g", ",g", ",g"))]
        loss, both = found.pair((method, "loss"), (method, "gradients"))
        gradient = number(None if loss is None or both is None else both - loss)
        cells += [found.time(method, "loss"), gradient, found.time(method, "gradients")]
        cells += [number(found.mib(method, pass_), ",.0f") for pass_ in ("loss", "gradients")]
        lines.append([method, *cells])
    return _with_sources(markdown(head.split(" | "), lines), found)


def cce() -> list[str]:
    return _methods("cce", BY_NAME["gemma-2-2b"], CCE_TABLE)


def cce_ignored() -> list[str]:
    found, whole = (Measured(grid, BY_NAME["gemma-2-2b"]) for grid in ("cce-ignored", "cce"))
    head = ["method", "both, ms", "with half of the tokens ignored, ms", "ratio", "MiB beyond gradients"]
    lines = []
    for method in METHODS:
        before, after = whole.ms(method, "gradients"), found.ms(method, "gradients")
        if after is not None:
            mib = number(found.mib(method, "gradients"), ",.0f")
            lines.append([method, number(before), number(after), _ratio(after, before), mib])
    return _with_sources(markdown(head, lines), found, whole)


def blog() -> list[str]:
    lines: list[str] = []
    for name, published in BLOG_TABLE.items():
        shape = BY_NAME[name]
        lines += [f"{name}, {shape.tokens} x {shape.vocab} x {shape.hidden}:", ""]
        lines += [*_methods("blog", shape, published), ""]
    return lines


def chunks() -> list[str]:
    found, lines = Measured("chunks", BY_NAME["llama-3-8b"]), []
    for what, gib, ratio, method in (*CHUNKS_TABLE, ("", None, None, BEST)):
        cells = [what, number(gib), number(ratio), method.replace("canonical", "eager PyTorch")]
        cells += [number(found.ms(method, "gradients")), found.ratio(method, "gradients")]
        lines.append([*cells, number(found.mib(method, "gradients"), ",.0f")])
    head = ["published", "logits, GiB", "x baseline", "measured", "ms", "x eager PyTorch", "MiB beyond gradients"]
    return _with_sources(markdown(head, lines), found)


def _nvidia(most_tokens: int = 1 << 30) -> list[tuple[Shape, tuple[float, float, int, int], Measured]]:
    shapes = [Shape(f"nv-{n // 1024}k-{v // 1024}k", n, v, 4096) for n, v in NVIDIA_TABLE]
    return [(s, NVIDIA_TABLE[s[1:3]], Measured("nvidia", s)) for s in shapes if s.tokens <= most_tokens]


def nvidia_time() -> list[str]:
    """Their latency is of the loss alone; ours also of loss and gradients."""
    head = "N | V | published: canonical, ms | proposed, ms | ratio | eager, ms | ours, ms | ratio | "
    head += "product alone, ms | with gradients: eager, ms | ours, ms | ratio"
    rows, lines = _nvidia(), []
    for shape, (canonical, proposed, _, _), found in rows:
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", number(canonical), number(proposed)]
        cells.append(_ratio(proposed, canonical))
        loss, both = (
            [found.time("canonical", pass_), number(found.ms(BEST, pass_)), found.ratio(BEST, pass_)]
            for pass_ in ("loss", "gradients")
        )
        lines.append([*cells, *loss, number(found.product_ms), *both])
    return _with_sources(markdown(head.split(" | "), lines), *(found for _, _, found in rows))


def nvidia_memory() -> list[str]:
    """Inputs are in it, as they are in the published figures."""
    head = "N | V | published: canonical, MB | proposed, MB | ratio | eager, MiB | ours, MiB | ratio"
    rows, lines = _nvidia(), []
    for shape, (_, _, canonical, proposed), found in rows:
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", f"{canonical:,}", f"{proposed:,}"]
        inputs = shape.gradient_bytes / MIB  # as large as their gradients
        sizes = [found.mib(method, "loss") for method in ("canonical", BEST)]
        eager, ours = (None if size is None else size + inputs for size in sizes)
        cells += [_ratio(proposed, canonical), number(eager, ",.0f"), number(ours, ",.0f"), _ratio(ours, eager)]
        lines.append(cells)
    return _with_sources(markdown(head.split(" | "), lines), *(found for _, _, found in rows))


def windows() -> list[str]:
    """The cost of few tokens: our loss beside the bare product, and how many tiles a launch has."""
    head = ["N", "V", "tiles of 256 x 192", "for each of 132 multiprocessors", "ours / bare product"]
    rows, lines = _nvidia(most_tokens=4096), []
    for shape, _, found in rows:
        tiles = -(-shape.tokens // 256) * -(-shape.vocab // 192)
        row, _ = found.found(BEST, "loss")
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", f"{tiles:,}", number(tiles / 132, ".1f")]
        lines.append([*cells, number(row.burst_ratio if row else None)])
    return _with_sources(markdown(head, lines), *(found for _, _, found in rows))


TABLES = {
    "cce": cce,
    "cce-ignored": cce_ignored,
    "blog": blog,
    "chunks": chunks,
    "nvidia-time": nvidia_time,
    "nvidia-memory": nvidia_memory,
    "windows": windows,
}
