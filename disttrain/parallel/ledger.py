"""The communication ledger: what a rank sends, by axis and collective, from the counts that its axes keep.

`Axis.traffic` counts calls and bytes of the whole tensor. Of these a rank of n sends 2(n-1)/n in an all-reduce, (n-1)/n in an
all-gather, a reduce-scatter, an all-to-all (of its own part) or, in the mean over ranks, a reduce; all of them in a broadcast,
a send, a shift; what it receives another has sent. (Ring algorithms: Patarasuk and Yuan 2009; Chan et al. 2007. A tree moves as
much in other steps.) What ranks measure rides along with a step at log points, 8 bytes a value and rank, and is left out.
"""

from __future__ import annotations

from disttrain.parallel.mesh import Mesh


def sent(collective: str, num_bytes: float, size: int) -> float:
    """Bytes that a rank of `size` sends in one `collective` of a whole tensor of `num_bytes`."""
    if collective == "all_reduce":
        return 2.0 * num_bytes * (size - 1) / size
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "reduce"):
        return num_bytes * (size - 1) / size
    return 0.0 if collective == "receive" else float(num_bytes)


class Books:
    """What this rank has sent over each axis, page by page."""

    def __init__(self, mesh: Mesh) -> None:
        """The first page begins."""
        self._books = [(axis.name, axis.size, axis.traffic) for axis in mesh.axes() if axis.group is not None]
        self._turned: dict[str, float] = {}
        self.turn()

    def turn(self) -> dict[str, float]:
        """`<axis>/<collective>`: bytes sent since the last turn; another page begins."""
        total = {
            f"{name}/{collective}": sent(collective, entry[1], size)
            for name, size, traffic in self._books
            for collective, entry in traffic.items()
            if collective != "receive"
        }
        moved = {name: num_bytes - self._turned.get(name, 0.0) for name, num_bytes in total.items()}
        self._turned = total
        return {name: num_bytes for name, num_bytes in moved.items() if num_bytes}
