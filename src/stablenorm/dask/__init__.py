"""The norms of Dask arrays, chunk by chunk. Imported only where there is one: it loads Dask."""
