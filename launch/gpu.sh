# shellcheck shell=bash
# Sourced where an experiment runs on GPUs; what is set already stays as it is.

# Compiled programs are kept, so that a repeated or resumed run starts at once.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
# Exchange while computing; and sum a gradient that all layers of a scan share, such as the metric
# generator's, after the loop rather than in every layer.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_latency_hiding_scheduler=true \
--xla_gpu_enable_while_loop_reduce_scatter_code_motion=true}"
# JAX takes 75% of a GPU's memory unless told otherwise; experiments.plan counts on 90%.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
