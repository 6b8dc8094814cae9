"""The communicator that the library makes from NCCL's, on one GPU, called as a group's run calls it.

With one rank a sum returns its input, so errors in the numbers of dtypes or in counts show.
"""

import ctypes

import pytest
import torch
from logitless import native
from logitless.run import CODES, DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def nccl():
    torch.cuda.init()
    return ctypes.CDLL("libnccl.so.2")  # PyTorch has opened it


@pytest.fixture(scope="module")
def communicator(nccl):
    of_nccl, device = ctypes.c_void_p(), ctypes.c_int(0)
    assert nccl.ncclCommInitAll(ctypes.byref(of_nccl), 1, ctypes.byref(device)) == 0
    made = native.Communicator(size=1)
    native.check(native.library().logitless_communicator_from_nccl(of_nccl, ctypes.byref(made)))
    yield made
    assert nccl.ncclCommDestroy(of_nccl) == 0


def values(dtype, count=77):
    return (torch.arange(count, device="cuda") - 30).to(dtype)


def test_it_is_of_one_rank(communicator):
    assert (communicator.rank, communicator.size) == (0, 1)


@pytest.mark.parametrize("number, dtype", DTYPES.items())
def test_collectives_of_every_dtype(communicator, number, dtype):
    stream = torch.cuda.current_stream().cuda_stream
    sent = values(dtype)
    for collective in (communicator.all_gather, communicator.reduce_scatter):
        received = torch.zeros_like(sent).repeat(2)
        arguments = sent.data_ptr(), received.data_ptr(), sent.numel(), number, stream, communicator.host
        assert collective(*arguments) == 0
        assert torch.equal(received[: sent.numel()], sent) and not received[sent.numel() :].any()
    data = sent.clone()
    assert communicator.all_reduce(data.data_ptr(), data.numel(), number, stream, communicator.host) == 0
    assert torch.equal(data, sent)


def test_they_are_queued_on_the_stream(communicator):
    """They run in the stream's order, and no call waits for it."""
    stream = torch.cuda.Stream()
    sent = values(torch.float32, 1 << 20)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        written = sent + 1
        received = torch.zeros_like(sent)
        arguments = written.data_ptr(), received.data_ptr(), sent.numel(), CODES[torch.float32]
        arguments = (*arguments, stream.cuda_stream, communicator.host)
        assert communicator.all_gather(*arguments) == 0
        assert not stream.query()
        read = received.clone()
    stream.synchronize()
    assert torch.equal(read, sent + 1)


def test_a_failure_is_told(communicator):
    data = values(torch.float32)
    assert communicator.all_reduce(data.data_ptr(), data.numel(), 99, 0, communicator.host) != 0  # no such dtype
