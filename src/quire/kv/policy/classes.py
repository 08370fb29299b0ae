"""The classes by which the model tells blocks apart.

A block that came back is known by its number of uses: 2, 3 to 4, 5 to 8, … 513 and more. A new one
is known by its request: how many requests its chain grew out of, one behind the other (a third turn
of a talk is likelier to be followed by another than a first), and whether it is the request's last
block, which is seldom full and then matches nothing.
"""

LARGEST_USE_CLASS = 10
OLDEST_GENERATION = 3
NUM_CLASSES = LARGEST_USE_CLASS + 2 * OLDEST_GENERATION
MOST_USES = 1 << LARGEST_USE_CLASS - 1  # more are not counted
CLASS_OF_NEW = [LARGEST_USE_CLASS + 2 * (born - 1) for born in range(OLDEST_GENERATION + 1)]
CLASS_AFTER = [uses.bit_length() - 1 for uses in range(MOST_USES + 1)]  # that many uses
NEXT_GENERATION = [min(now + 1, OLDEST_GENERATION) for now in range(OLDEST_GENERATION + 1)]
