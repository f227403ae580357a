"""How the numbers of `core` are computed fast; `choose` is the one door."""
