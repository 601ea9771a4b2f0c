"""A small paged engine in plain torch: the executable description of how an engine uses kvstore.

Read in this order: ``request`` (words), ``model`` and ``pool`` (bytes), ``prefix_tree`` and
``scheduler`` (pure decisions), ``engine`` (the step loop), ``store`` (the adapter), ``server``.
"""
