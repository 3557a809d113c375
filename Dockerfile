# What scripts/serve_notebook --container and scripts/setup_gpu_host --container run.
# The compiler and CUDA's headers are for what DeepSpeed and torch compile at first use.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Versions of Ubuntu's packages follow its release; older ones are not kept.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /ftkit

# The libraries, by the script that everybody uses; they stay while only the code changes. No GPU is
# seen while an image is built. A cache of uv would make the image as large again.
ENV UV_NO_CACHE=1
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY scripts/setup_env scripts/uv_pip.py scripts/
COPY ftkit/__init__.py ftkit/
RUN scripts/setup_env --notebook --cuda

COPY . .
CMD ["scripts/serve_notebook"]
