"""Options with which XLA compiles faster and worse: compiling is nearly all of the time of most
tests.
"""

from importlib.metadata import version

# On the CPU, jaxlib 0.10 emits its loops through MLIR, or in half of the time without it; later
# versions cannot choose.
_WITHOUT_MLIR = (
    {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
)

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    **_WITHOUT_MLIR,
}
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

# XLA's defaults, for single executables of a process that compiles quickly: those whose bits or
# text are looked at.
AS_USERS_HAVE_IT = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    **dict.fromkeys(_WITHOUT_MLIR, True),
}
