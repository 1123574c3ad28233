"""Data sets that are made where they are used: no network, the same bytes every time, nothing by halves."""
