"""Figures that papers and blogs give, with their sources: what stands beside ours in docs/studies/papers.md."""

from __future__ import annotations

from typing import NamedTuple

# NVIDIA: Dong and Chang, arXiv 2511.17599, Table 2; GB200, PyTorch 2.9, bf16, D 4096.
# (N, V): latency canonical, proposed (ms); memory canonical, proposed (MB)
NVIDIA_TABLE: dict[tuple[int, int], tuple[float, float, int, int]] = {
    (1024, 32768): (0.73, 0.69, 1064, 280),
    (1024, 65536): (1.40, 0.97, 2088, 536),
    (1024, 131072): (2.76, 1.27, 4136, 1048),
    (1024, 262144): (5.46, 1.83, 8232, 2072),
    (4096, 32768): (1.66, 1.16, 1904, 304),
    (4096, 65536): (3.34, 1.69, 3696, 561),
    (4096, 131072): (6.78, 2.86, 7280, 1073),
    (4096, 262144): (13.70, 5.22, 14448, 2099),
    (8192, 32768): (2.93, 1.70, 3024, 337),
    (8192, 65536): (6.08, 2.90, 5840, 593),
    (8192, 131072): (13.25, 5.58, 11472, 1107),
    (8192, 262144): (27.77, 10.79, 22736, 2133),
    (16384, 32768): (5.62, 3.43, 5264, 401),
    (16384, 65536): (12.41, 6.61, 10128, 659),
    (16384, 131072): (26.67, 13.20, 19856, 1173),
    (16384, 262144): (50.15, 25.43, 39312, 2203),
    (32768, 32768): (11.42, 7.00, 9744, 531),
    (32768, 65536): (25.64, 13.80, 18704, 790),
    (32768, 131072): (50.24, 27.06, 36624, 1307),
    (32768, 262144): (96.52, 53.61, 72464, 2342),
}


class Method(NamedTuple):
    """Milliseconds and MB of the loss alone and of loss and gradients; None where no figure was found."""

    loss_ms: float | None
    both_ms: float | None
    loss_mb: float | None
    both_mb: float | None


# Wijmans et al., arXiv 2411.09009, Table 1; A100-SXM4 80 GB, PyTorch 2.4.1, bf16, Gemma 2 2B's head, 8,192 tokens:
# those figures that two texts about the paper give alike; the paper itself was not at hand.
CCE_TABLE: dict[str, Method] = {
    "apple cce": Method(46, 145, 1, 1164),
    "torch.compile": Method(49, 143, None, 16000),
    "canonical": Method(None, 208, 24000, 28000),
    "liger": Method(None, 304, None, None),
    "apple cce_kahan_full_c": Method(None, 313, None, 2326),
    "apple cce_exact": Method(None, 357, None, None),  # "no gradient filter"
}
# https://damilojohn.github.io/categories/nlp/, A100 40 GB
BLOG_TABLE: dict[str, dict[str, Method]] = {
    "gemma-e2b": {
        "apple cce": Method(None, 84.49, None, 794.2),
        "torch.compile": Method(None, 85.80, None, 4888.0),
        "canonical": Method(None, 148.26, None, 24576.0),
    },
    "mistral-nemo": {
        "apple cce": Method(None, 179.16, None, 1361.4),
        "torch.compile": Method(None, 130.71, None, 3408.0),
        "canonical": Method(None, 154.69, None, 12288.0),
    },
}
# https://juyoung.site/blog/fused-lce/, H100 80 GB, Llama 3 8B's head, 8,192 tokens:
# (what, logits' peak in GiB, forward and backward in that of the baseline, ours at the same bytes)
CHUNKS_TABLE = (
    ("baseline", 8.4, 1.00, "canonical"),
    ("chunks of 1024 tokens", 0.50, 1.04, "logitless 512 MiB"),
    ("chunks of 256 tokens", 0.13, 1.11, "logitless 128 MiB"),
)
