"""Tables of docs/studies/papers.md: published figures beside ours, of the grids' record or else of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable

from record import Gemms, Row, load
from shapes import BY_NAME, Shape
from studies import RECORDS, ROOT
from studies.published_figures import BLOG_TABLE, CCE_TABLE, CHUNKS_TABLE, NVIDIA_TABLE, Method
from studies.record import StudyRecord
from table import markdown, number

EARLIER = ("heads-2026-11-22", "products-2026-11-23")  # of bench/records, which have some of the shapes
MIB = 1 << 20
OURS = ("logitless unlimited", "logitless 2560 MiB", "logitless 160 MiB", "logitless thinned 2^-9")
PEERS: tuple[str, ...] = ("torch.compile", "canonical", "apple cce", "apple cce_kahan_full_c", "apple cce_exact")
PEERS += ("liger", "liger fp32", "fla")


class Measured:
    """Rows of one shape, and where those that a table looked up are from."""

    def __init__(self, shape: Shape, gemms: Gemms | None = None) -> None:
        self.shape, self.gemms = shape, gemms
        self.rows: dict[tuple[str, str], tuple[Row, str]] = {}
        self._used: dict[str, None] = {}

    def add(self, rows: Iterable[Row], source: str) -> None:
        for row in rows:
            self.rows.setdefault((row.method, row.pass_), (row, source))

    @property
    def sources(self) -> list[str]:
        return list(self._used)

    def found(self, method: str, pass_: str) -> tuple[Row | None, str]:
        name = "logitless loss" if pass_ == "loss" and method in OURS[:3] else method
        row, source = self.rows.get((name, pass_), (None, ""))
        if row is not None:
            self._used[source] = None
        return row, source

    def row(self, method: str, pass_: str) -> Row | None:
        return self.found(method, pass_)[0]

    def gradient_ms(self, method: str) -> float | None:
        """Both minus loss, of one run."""
        (loss, where), (both, there) = self.found(method, "loss"), self.found(method, "gradients")
        if loss is None or both is None or where != there or loss.burst_ms is None or both.burst_ms is None:
            return None
        return both.burst_ms - loss.burst_ms

    def ms(self, method: str, pass_: str) -> float | None:
        row = self.row(method, pass_)
        return row.burst_ms if row is not None else None

    def ratio(self, method: str, base: str, pass_: str) -> float | None:
        """Of two times of one run."""
        (row, where), (other, there) = self.found(method, pass_), self.found(base, pass_)
        if row is None or other is None or where != there or row.burst_ms is None or not other.burst_ms:
            return None
        return row.burst_ms / other.burst_ms

    def mib(self, method: str, pass_: str) -> float | None:
        """Beyond inputs and gradients."""
        row = self.row(method, pass_)
        return None if row is None or row.extra_mib is None else row.extra_mib - row.gradient_mib

    def time(self, method: str, pass_: str) -> str:
        row = self.row(method, pass_)
        return "-" if row is None else number(row.burst_ms, ".2f") if row.status == "ok" else row.status


def grids() -> StudyRecord:
    return StudyRecord("grids", RECORDS / "grids.json.xz")


def measured(grid: str, shape: Shape) -> Measured | None:
    """Of the grids' record; what is not measured there, of earlier runs of single heads. A row that failed stands where
    nobody measured it."""
    record, found = grids(), Measured(shape)
    parts: list[tuple[list[Row], Gemms | None, str]] = []
    cell = record.holds(f"{grid}/{shape.name}")
    if cell is not None:
        gemms = next((Gemms(**item) for item in cell["gemms"]), None)
        parts.append(
            ([Row(**row) for row in cell["rows"]], gemms, f"grids, {record.sessions[cell['session']]['date']}")
        )
    for name in EARLIER if grid != "cce-ignored" else ():
        earlier = load(str(ROOT / "bench" / "records" / f"{name}.json"))
        same = next((other.name for other in earlier.shapes if other[1:] == shape[1:]), None)
        if same is not None:
            parts.append(([row for row in earlier.rows if row.shape == same], earlier.gemms[same], name))
    for rows, gemms, source in parts:
        found.add((row for row in rows if row.status == "ok"), source)
    products = [gemms for _, gemms, _ in parts if gemms is not None and gemms.burst]
    if products:
        found.gemms = products[-1 if cell is None else 0]
    for rows, _, source in parts:
        found.add((row for row in rows if row.status != "ok"), source)
    return found if found.rows else None


def source_line(found: list[Measured]) -> list[str]:
    names = list(dict.fromkeys(source for item in found for source in item.sources))
    if not names:
        return ["", "Nothing is measured yet: this has not run."]
    warning = " Times of different runs compare less well than those of one." if len(names) > 1 else ""
    return ["", f"Measured: {', '.join(names)}.{warning}"]


def _published(figures: Method | None) -> list[str]:
    if figures is None:
        return ["", "", "", ""]
    ms = [number(figures.loss_ms, "g"), number(figures.both_ms, "g")]
    return [*ms, number(figures.loss_mb, ",g"), number(figures.both_mb, ",g")]


def _methods(grid: str, shape: Shape, published: dict[str, Method]) -> list[str]:
    """A row a method: what was published, then ours: loss, gradient (both minus loss), both, and memory."""
    head = ["method", "published: loss, ms", "both, ms", "loss, MB", "both, MB"]
    head += ["measured: loss, ms", "gradient, ms *", "both, ms", "loss, MiB", "both, MiB beyond gradients"]
    found = measured(grid, shape)
    lines = []
    for method in (*OURS, *PEERS):
        cells = [method, *_published(published.get(method))]
        if found is not None:
            cells += [found.time(method, "loss"), number(found.gradient_ms(method)), found.time(method, "gradients")]
            cells += [number(found.mib(method, "loss"), ",.0f"), number(found.mib(method, "gradients"), ",.0f")]
        else:
            cells += ["-"] * 5
        if set(cells[1:]) - {"", "-"}:
            lines.append(cells)
    return [*markdown(head, lines), *source_line([found] if found else [])]


def cce() -> list[str]:
    return _methods("cce", BY_NAME["gemma-2-2b"], CCE_TABLE)


def cce_ignored() -> list[str]:
    found = measured("cce-ignored", BY_NAME["gemma-2-2b"])
    if found is None:
        return ["This has not run."]
    whole = measured("cce", BY_NAME["gemma-2-2b"])
    head = ["method", "both, ms", "with half of the tokens ignored, ms", "ratio", "MiB beyond gradients"]
    lines = []
    for method in (*OURS, *PEERS):
        before, after = whole.ms(method, "gradients") if whole else None, found.ms(method, "gradients")
        if after is not None:
            ratio = number(after / before) if before else "-"
            cells = [method, number(before), number(after), ratio, number(found.mib(method, "gradients"), ",.0f")]
            lines.append(cells)
    return [*markdown(head, lines), *source_line([found, *([whole] if whole else [])])]


def blog() -> list[str]:
    lines: list[str] = []
    for name, published in BLOG_TABLE.items():
        shape = BY_NAME[name]
        lines += [f"{name}, {shape.tokens} x {shape.vocab} x {shape.hidden}:", ""]
        lines += [*_methods("blog", shape, published), ""]
    return lines[:-1]


def chunks() -> list[str]:
    found = measured("chunks", BY_NAME["llama-3-8b"])
    head = ["published", "logits, GiB", "x baseline", "measured", "ms", "x eager PyTorch", "MiB beyond gradients"]
    lines = []
    for what, gib, ratio, method in (*CHUNKS_TABLE, ("", None, None, "logitless unlimited")):
        cells = [what, number(gib), number(ratio), method.replace("canonical", "eager PyTorch")]
        if found is not None:
            cells += [number(found.ms(method, "gradients")), number(found.ratio(method, "canonical", "gradients"))]
            cells += [number(found.mib(method, "gradients"), ",.0f")]
        else:
            cells += ["-"] * 3
        lines.append(cells)
    return [*markdown(head, lines), *source_line([found] if found else [])]


def _nvidia() -> list[tuple[Shape, tuple[float, float, int, int], Measured | None]]:
    found = []
    for (tokens, vocab), figures in NVIDIA_TABLE.items():
        shape = Shape(f"nv-{tokens // 1024}k-{vocab // 1024}k", tokens, vocab, 4096)
        found.append((shape, figures, measured("nvidia", shape)))
    return found


def _ratio(a: float | None, b: float | None) -> str:
    return number(a / b if a is not None and b else None)


def nvidia_time() -> list[str]:
    """Their latency is of the loss alone; ours also of loss and gradients."""
    head = ["N", "V", "published: canonical, ms", "proposed, ms", "ratio", "eager, ms", "ours, ms", "ratio"]
    head += ["product alone, ms", "with gradients: eager, ms", "ours, ms", "ratio"]
    lines, sources = [], []
    for shape, (canonical, proposed, _, _), found in _nvidia():
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", number(canonical), number(proposed)]
        cells.append(_ratio(proposed, canonical))
        if found is None:
            cells += ["-"] * 7
        else:
            sources.append(found)
            for pass_ in ("loss", "gradients"):
                cells += [found.time("canonical", pass_), number(found.ms("logitless unlimited", pass_))]
                cells.append(number(found.ratio("logitless unlimited", "canonical", pass_)))
                if pass_ == "loss":
                    cells.append(number(found.gemms.burst.get("logits") if found.gemms else None))
        lines.append(cells)
    return [*markdown(head, lines), *source_line(sources)]


def nvidia_memory() -> list[str]:
    """Inputs are in it, as they are in the published figures."""
    head = ["N", "V", "published: canonical, MB", "proposed, MB", "ratio", "eager, MiB", "ours, MiB", "ratio"]
    lines, sources = [], []
    for shape, (_, _, canonical, proposed), found in _nvidia():
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", f"{canonical:,}", f"{proposed:,}"]
        cells.append(_ratio(proposed, canonical))
        if found is None:
            cells += ["-"] * 3
        else:
            sources.append(found)
            inputs = shape.gradient_bytes / MIB  # as large as their gradients
            sizes = [found.mib(method, "loss") for method in ("canonical", "logitless unlimited")]
            eager, ours = (None if size is None else size + inputs for size in sizes)
            cells += [number(eager, ",.0f"), number(ours, ",.0f"), _ratio(ours, eager)]
        lines.append(cells)
    return [*markdown(head, lines), *source_line(sources)]


def windows() -> list[str]:
    """What few tokens cost: our loss beside the bare product, and how many tiles a launch has."""
    head = ["N", "V", "tiles of 256 x 192", "for each of 132 multiprocessors", "ours / bare product"]
    lines, sources = [], []
    for shape, _, found in _nvidia():
        if shape.tokens > 4096:
            continue
        tiles = -(-shape.tokens // 256) * -(-shape.vocab // 192)
        row = found.row("logitless unlimited", "loss") if found else None
        sources += [found] if found else []
        cells = [f"{shape.tokens:,}", f"{shape.vocab:,}", f"{tiles:,}", number(tiles / 132, ".1f")]
        lines.append([*cells, number(row.burst_ratio if row else None)])
    return [*markdown(head, lines), *source_line(sources)]


TABLES = {
    "cce": cce,
    "cce-ignored": cce_ignored,
    "blog": blog,
    "chunks": chunks,
    "nvidia-time": nvidia_time,
    "nvidia-memory": nvidia_memory,
    "windows": windows,
}
