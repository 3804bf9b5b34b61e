# Two images: docker build --target cpu -t lorax:cpu .   and   docker build --target cuda -t lorax:cuda .
# docs/deployment.md describes them. With --build-arg RAY=1 they have Ray as well.
ARG PYTHON=3.12

# --- Build: everything goes into /opt/lorax --------------------------------------------------------------------------

FROM python:${PYTHON}-slim-bookworm AS build
# Kernels for CPUs are built when the package is installed.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/lorax
COPY constraints.txt ./

FROM build AS build-cpu
ARG RAY=
# On x86 torch brings CUDA's libraries along, unless pip finds it in an index of builds for CPUs (2.13.0+cpu).
ARG TORCH_INDEX=
RUN /opt/lorax/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch==2.13.0
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY lorax_server lorax_server
RUN /opt/lorax/bin/pip install -c constraints.txt ".[otel,s3${RAY:+,ray}]"

FROM build AS build-cuda
ARG RAY=
# torch for CUDA comes with Triton and NVIDIA's libraries in versions of its own.
RUN grep -v -e '^triton==' -e '^nvidia-' -e '^cuda-' constraints.txt > cuda-constraints.txt
RUN /opt/lorax/bin/pip install -c cuda-constraints.txt torch==2.13.0
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY lorax_server lorax_server
RUN /opt/lorax/bin/pip install -c cuda-constraints.txt ".[gpu,otel,s3${RAY:+,ray}]"

# --- Run: no compiler, no sources, no root ---------------------------------------------------------------------------

FROM python:${PYTHON}-slim-bookworm AS run
# tini is process 1: it reaps orphaned processes, which would stay zombies otherwise.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
# /data is for what is fetched and compiled: models, adapters, kernels. It should be a volume.
RUN useradd --uid 10001 --no-create-home --home-dir /data lorax \
    && install --directory --owner=lorax --group=lorax /data
ENV PATH=/opt/lorax/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    HUGGINGFACE_HUB_CACHE=/data/hub \
    LORAX_CACHE=/data/lorax
VOLUME /data
WORKDIR /data
EXPOSE 3000
HEALTHCHECK --interval=15s --timeout=5s --start-period=20m --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('PORT', '3000') + '/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "lorax", "serve", "--hostname", "0.0.0.0"]

FROM run AS cuda
# Triton compiles a few lines of C for each kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/lorax /opt/lorax
USER 10001

# The last one is built where no target is named.
FROM run AS cpu
COPY --from=build-cpu /opt/lorax /opt/lorax
USER 10001
