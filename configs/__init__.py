"""One module per experiment of the paper; `get_config(size)` writes every value out."""
