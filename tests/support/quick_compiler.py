"""Options that make XLA compile faster but optimize less.

Most tests spend nearly all of their time on compiling.
"""

from importlib.metadata import version

# On the CPU, jaxlib 0.10 can emit loops with or without MLIR. Compiling takes half as long without
# it. Later versions don't offer this choice.
_WITHOUT_MLIR = (
    {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
)

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    **_WITHOUT_MLIR,
}
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

# XLA's defaults, for executables whose bits or text a test examines, in a process that otherwise
# compiles quickly.
AS_USERS_HAVE_IT = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    **dict.fromkeys(_WITHOUT_MLIR, True),
}
