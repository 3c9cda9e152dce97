"""Numbers as modules and classes hold them."""

LIMIT = 0.5
UNUSED = 0.25


class Namespace:
    limit = 0.5
