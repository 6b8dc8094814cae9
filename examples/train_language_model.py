"""Trains one small language model twice on this machine's own text: with logits in memory, and with logitless.

./scripts/quickstart installs what it needs and runs it. Both heads start from the same parameters and see the same
batches. Each runs in its own process, so its memory is its own. --output gets tables of figures and charts. At the end
the model goes on with a piece of the text.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import pathlib
import random
import signal
import sys
import sysconfig
import time

import logitless
import numpy
import tokenizers
import torch
import torch.nn.functional as F
import tqdm

HEADS = ("materialized", "logitless")
COMPARED = 8  # first steps, whose losses must agree
BYTES, HEAD_DIM, RATE = 256, 16, 5e-4
SYSTEM_TEXT = {sysconfig.get_path("stdlib"): (".py",), "/usr/share/common-licenses": ("",),
               "/usr/share/doc": ("", ".txt", ".md", ".html"), "/usr/include": (".h", ".hpp", "")}  # fmt: skip


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("text", nargs="*", help="files and folders; default: Python's library and the system's documentation")
    add("--output", type=pathlib.Path, default=pathlib.Path("logitless-train"), help="folder of the results")
    add("--device", default="auto", help="cpu, cuda, cuda:N, or auto: a GPU that logitless can use, else the CPU")
    add("--steps", type=count, default=40, help="steps with each head")
    add("--vocab", type=count, default=16384, help="entries of the vocabulary")
    add("--dim", type=count, default=256, help="width of the hidden states")
    add("--batch", type=count, default=8, help="sequences per step")
    add("--length", type=count, default=256, help="tokens per sequence")
    add("--budget", default="32MiB", help="largest workspace of logitless's head")
    add("--max-text", type=count, default=8, metavar="MB", help="most text to read")
    args = parser.parse_args()
    if args.dim % HEAD_DIM:
        parser.error(f"argument --dim: expected a multiple of {HEAD_DIM}, got {args.dim}")
    if args.vocab < BYTES:
        parser.error(f"argument --vocab: expected at least {BYTES}, an entry for each byte, got {args.vocab}")
    usable = torch.cuda.is_available() and any(b.name == "cuda" and not b.why_unavailable for b in logitless.backends())
    places = ["cpu", *(["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if usable else [])]
    args.device = places[:2][-1] if args.device == "auto" else args.device
    if args.device not in places:
        parser.error(f"argument --device: expected one of auto, {', '.join(places)}, got {args.device!r}")
    return args


def read_text(args: argparse.Namespace) -> list[str]:
    """Reads files in a random order, up to --max-text: from the given paths, else from the system's folders in turn."""
    texts, size, most = [], 0, args.max_text * 10**6
    for place, suffixes in [(path, None) for path in args.text] or SYSTEM_TEXT.items():
        root = pathlib.Path(place)
        if args.text and not root.exists():
            sys.exit(f"error: text: expected files and folders, got {place!r}, which does not exist")
        paths = [root] if root.is_file() else root.rglob("*")
        files = sorted(p for p in paths if not suffixes or (p.suffix in suffixes and "-packages" not in str(p)))
        random.Random(0).shuffle(files)
        for path in files:
            try:
                data = path.read_bytes()[: most - size] if size < most and path.is_file() else b""
                texts.extend([data.decode(errors="ignore" if len(data) == most - size else "strict")] * bool(data))
            except (OSError, UnicodeDecodeError):
                continue  # not text
            size += len(data)
    needed = max(32 * args.vocab, 32 * args.batch * args.length)
    if size < needed:
        sys.exit(f"error: text: expected at least {needed:,} bytes for --vocab {args.vocab} and {args.batch} x "
                 f"{args.length} tokens a step, got {size:,}; name more files or folders")  # fmt: skip
    return texts


def tokenize(args: argparse.Namespace) -> tuple[tokenizers.Tokenizer, numpy.ndarray]:
    start, texts = time.perf_counter(), read_text(args)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=args.vocab, initial_alphabet=tokenizer.pre_tokenizer.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    if (learned := tokenizer.get_vocab_size()) != args.vocab:
        sys.exit(f"error: --vocab: expected at most {learned}, the pairs that this text repeats, got {args.vocab}")
    tokens = numpy.concatenate([numpy.array(encoded.ids, numpy.int32) for encoded in tokenizer.encode_batch(texts)])
    took = time.perf_counter() - start
    print(f"text  {len(texts):,} files: {len(tokens):,} tokens of {learned:,}, in {took:.0f} s", flush=True)
    return tokenizer, tokens


class LanguageModel(torch.nn.Module):
    def __init__(self, vocab: int, dim: int, length: int):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(length, dim)
        sizes = (dim, dim // HEAD_DIM, 4 * dim)
        layer = torch.nn.TransformerEncoderLayer(*sizes, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, torch.nn.RMSNorm(dim), enable_nested_tensor=False)
        self.head = torch.nn.Linear(dim, vocab, bias=False)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # returns hidden states for the head
        return self.layers(self.tokens(ids) + self.places.weight, mask=self.mask, is_causal=True).flatten(0, 1)


def peak_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def tolerances(hidden: torch.Tensor, weight: torch.Tensor, loss: float) -> tuple[float, float]:
    """Returns allowed differences of two fp32 losses, and of two gradients relative to the sum of their magnitudes.

    A sum of n terms is wrong by 6 sqrt(n) u of its terms' magnitudes (Higham and Mary 2019). A softmax is wrong by the
    errors of two logits, of the sum of its exponentials, and some roundings. Both heads have these errors.
    """
    unit, size = 2.0**-24, (hidden.norm(dim=1).max() * weight.norm(dim=1).max()).item()
    logit, exps, row = (6 * n**0.5 * unit for n in (weight.shape[1], len(weight), max(len(weight), len(hidden))))
    softmax = 2 * logit * size + exps + unit * (2 * size + 4)
    return 2 * (softmax + 3 * unit * loss), 2 * (softmax + row)


@torch.no_grad()
def generate(model: LanguageModel, text: torch.Tensor, length: int) -> list[int]:
    """Goes on with the first half of a window of the text, by up to 32 tokens, and returns these."""
    ids, places = text[None, :length].to(model.head.weight.device), range(max(1, length // 2), length)[:32]
    for place in places:  # no position sees the ids after it
        hidden = model(ids)[place - 1 : place]
        token = logitless.sample(hidden, model.head.weight, temperature=0.8, top_k=40, seed=place).ids
        if token < 0:
            print("the model has diverged: its logits are NaN or infinite, and no text goes on from there")
            return ids[0, places.start : place].tolist()
        ids[0, place] = token
    return ids[0, places.start : places.stop].tolist()


def train(head: str, args: argparse.Namespace, tokens: numpy.ndarray) -> dict:
    torch.manual_seed(0)
    model = LanguageModel(args.vocab, args.dim, args.length).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    text, order = torch.from_numpy(tokens).long(), torch.Generator().manual_seed(0)
    losses, bounds, steps, heads, drift, before = [], [], [], [], 0.0, peak_bytes(args.device)
    for step in (bar := tqdm.trange(args.steps, desc=f"{head:>12}", disable=None)):
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=order)
        ids = text[starts + torch.arange(args.length + 1)].to(args.device)
        weight, targets = model.head.weight, ids[:, 1:].flatten()
        start = now(args.device)
        hidden = model(ids[:, :-1])
        cut = hidden.detach().requires_grad_()  # so that the head with its gradients is timed alone
        begin = now(args.device)
        if head == "logitless":
            loss = logitless.linear_cross_entropy(cut, weight, targets, max_workspace_bytes=args.budget)
        else:
            loss = F.cross_entropy(cut @ weight.T, targets)
        loss.backward()
        heads.append(now(args.device) - begin)
        hidden.backward(cut.grad)
        optimizer.step()
        steps.append(now(args.device) - start)
        losses.append(loss.item())
        if step < COMPARED:
            of_loss, of_gradient = tolerances(cut.detach(), weight.detach(), losses[-1])
            bounds.append(of_loss + drift)
            # AdamW moves a parameter by about its rate. An error of the gradient moves the next loss by at most that.
            drift += 2 * of_gradient * RATE * sum(p.grad.abs().sum().item() for p in model.parameters())
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    result = {"losses": losses, "tolerances": bounds, "before_bytes": before, "peak_bytes": peak_bytes(args.device)}
    result |= {"step_seconds": float(numpy.median(steps)), "head_seconds": float(numpy.median(heads))}
    return result | ({"generated": generate(model, text, args.length)} if head == "logitless" else {})


def train_in_own_process(head: str, args: argparse.Namespace, tokens: numpy.ndarray) -> dict:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C goes to the parent process only
        future = pool.submit(train, head, args, tokens)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return future.result()
        except KeyboardInterrupt:
            [process.terminate() for process in multiprocessing.active_children()]
            raise
        except Exception as error:
            sys.exit(f"error: {head}: {error}")


def show(args: argparse.Namespace, runs: dict) -> None:
    def row(name: str, form: str, value) -> None:
        print(f"{name:32}" + "".join(f"{format(value(runs[head]), form):>16}" for head in HEADS))

    print("\n" + " " * 32 + "".join(f"{head:>16}" for head in HEADS))
    row("loss of the last step", ".4f", lambda run: run["losses"][-1])
    row("head and its gradients, ms", ",.1f", lambda run: 1e3 * run["head_seconds"])
    row("whole step, ms", ",.1f", lambda run: 1e3 * run["step_seconds"])
    row("tokens a second", ",.0f", lambda run: args.batch * args.length / run["step_seconds"])
    row(
        "peak resident MiB" if args.device == "cpu" else "peak MiB of the GPU",
        ",.0f",
        lambda run: run["peak_bytes"] / 2**20,
    )
    row("  more than before training", ",.0f", lambda run: (run["peak_bytes"] - run["before_bytes"]) / 2**20)


def draw(runs: dict, differences: list[float], folder: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figures = {name: Figure(figsize=(7, 4), layout="constrained") for name in ("loss", "agreement", "memory")}
    loss, agreement, memory = (figure.subplots() for figure in figures.values())
    for head, style in zip(HEADS, ("-", "--")):
        loss.plot(runs[head]["losses"], style, label=head)
        memory.bar(head, (runs[head]["peak_bytes"] - runs[head]["before_bytes"]) / 2**20, label=head)
    agreement.semilogy([max(d, 1e-9) for d in differences], "o", label="difference of the losses")
    agreement.semilogy(runs["materialized"]["tolerances"], "--", label="tolerance, from fp32's rounding")
    loss.set(title="Training loss", xlabel="step", ylabel="nats a token")
    agreement.set(title="Losses of the two heads in the first steps", xlabel="step", ylabel="nats a token")
    memory.set(title="Peak memory beyond that before training", ylabel="MiB")
    for name, figure in figures.items():
        figure.axes[0].legend()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer, tokens = tokenize(args)
    logits = args.batch * args.length * args.vocab * 4 >> 20
    print(f"step  {args.batch} x {args.length} tokens on {args.device}; logits in fp32 take {logits} MiB", flush=True)
    runs = {head: train_in_own_process(head, args, tokens) for head in HEADS}
    differences = [abs(a - b) for a, b in zip(*(runs[head]["losses"][:COMPARED] for head in HEADS))]
    (args.output / "figures.json").write_text(json.dumps(runs | {"differences": differences}, indent=1) + "\n")
    draw(runs, differences, args.output)
    show(args, runs)
    for step, (got, bound) in enumerate(zip(differences, runs["materialized"]["tolerances"]), 1):
        if not got <= bound:
            sys.exit(f"error: step {step}: expected the heads' losses within {bound:.1e} of each other, got {got:.1e}")
    print(f"\nThe losses of the first {len(differences)} steps differ by {max(differences):.1e} at the most (tolerance "
          f"{bound:.1e}).\nIn {args.output}: loss.svg, memory.svg, agreement.svg and figures.json")  # fmt: skip
    start, rest = tokens[: args.length // 2][-16:].tolist(), runs["logitless"]["generated"]
    print(f"\nThe model goes on with a piece of the text:\n{tokenizer.decode(start)!r} ->\n{tokenizer.decode(rest)!r}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ntrain_language_model.py: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"error: {error}")
