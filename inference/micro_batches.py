"""How trainers divide the samples of a batch: micro-batches, and ranks."""

from collections.abc import Iterator, Sequence


def micro_batches(samples: int) -> Iterator[tuple[str, list[Sequence[int]]]]:
    """Yield (description, sample numbers of each group) for ways to divide a batch's samples.

    A *group* is a micro-batch or what one rank gets. Micro-batches are of samples that follow each
    other, the last may be shorter. Ranks get samples in turn, as torch's DistributedSampler deals
    them.
    """
    every = range(samples)
    sizes = {size for size in every[2:] if samples % size == 0} | {2**k for k in range(1, 12)}
    for size in sorted(size for size in sizes if size < samples):
        parts: list[Sequence[int]] = [every[at : at + size] for at in range(0, samples, size)]
        yield f"micro-batches of {size} samples", parts
    for ranks in every[2:]:
        if samples % ranks == 0:
            yield f"{ranks} ranks that get samples in turn", [every[i::ranks] for i in range(ranks)]
