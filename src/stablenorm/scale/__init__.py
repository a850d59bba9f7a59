"""Past one array: Dask arrays, files larger than memory, a feature axis in chunks."""
