"""A small paged engine in plain torch: the executable description of how an engine uses kvstore.

Reading order: ``request`` (data types), ``model`` and ``pool`` (bytes), ``prefix_tree`` and
``scheduler`` (pure decisions), ``engine`` (the step loop), ``store`` (the adapter), ``server``.
"""

__all__: list[str] = []
