"""What there is for arrays on a CUDA device beside the public functions, which take them as well."""

from stablenorm.kernels._cuda_workspace import CudaWorkspace

__all__ = ["CudaWorkspace"]
