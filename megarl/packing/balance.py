"""Parts of even sums."""

import heapq
from collections.abc import Sequence


def even_parts(costs: Sequence[float], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Splits `costs` into parts whose largest sum is small.

    Karmarkar and Karp's largest differencing method (The Differencing Method of Set Partitioning, 1982): the two
    partial solutions whose sums are spread furthest are put together, the largest part of one with the smallest of
    the other, until one is left.

    Args:
        costs: not negative.
        equal_size: every part has as many members; then `parts` divides their number.

    Returns:
        Indices of each part, ascending; parts in the order of their first members, empty ones last.

    Raises:
        ValueError: `parts` is below 1, or does not divide the number of costs where it must.
    """
    if parts < 1 or (equal_size and len(costs) % parts):
        raise ValueError(f"{len(costs)} costs do not make {parts} {'equal ' * equal_size}parts")
    if equal_size:
        # One of each part in every partial solution, so that all parts grow together.
        order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
        starts = [[[i] for i in order[k : k + parts]] for k in range(0, len(order), parts)]
    else:
        starts = [[[i], *([] for _ in range(parts - 1))] for i in range(len(costs))]
    heap = [_state(start, costs, number) for number, start in enumerate(starts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, a, one = heapq.heappop(heap)
        _, _, b, other = heapq.heappop(heap)
        heapq.heappush(heap, _state([x + y for x, y in zip(one, reversed(other), strict=True)], costs, number))
    found = heap[0][3] if heap else [[] for _ in range(parts)]
    return sorted(map(sorted, found), key=lambda part: part[0] if part else len(costs))


def _state(parts: list[list[int]], costs: Sequence[float], number: int):
    """Heap entry of a partial solution: widest spread first, then its number, which makes the order one."""
    summed = sorted(((sum(costs[i] for i in part), part) for part in parts), key=lambda pair: pair[0], reverse=True)
    sums = [total for total, _ in summed]
    return (sums[-1] - sums[0], number, sums, [part for _, part in summed])
