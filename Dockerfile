# Two images: docker build --target cpu -t lorax:cpu .   and   docker build --target cuda -t lorax:cuda .
# See docs/deployment.md. --build-arg RAY=1 adds Ray.
ARG PYTHON=3.12

# --- Build: install into /opt/lorax ----------------------------------------------------------------------------------

FROM python:${PYTHON}-slim-bookworm AS build
# CPU kernels are compiled during installation.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/lorax
COPY constraints.txt ./

FROM build AS build-cpu
ARG RAY=
# On x86, torch includes CUDA libraries unless TORCH_INDEX selects an index with CPU builds (2.13.0+cpu).
ARG TORCH_INDEX=
RUN /opt/lorax/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch==2.13.0
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY lorax_server lorax_server
RUN /opt/lorax/bin/pip install -c constraints.txt ".[otel,s3${RAY:+,ray}]"

FROM build AS build-cuda
ARG RAY=
# torch for CUDA pins the versions of Triton and the NVIDIA libraries.
RUN grep -v -e '^triton==' -e '^nvidia-' -e '^cuda-' constraints.txt > cuda-constraints.txt
RUN /opt/lorax/bin/pip install -c cuda-constraints.txt torch==2.13.0
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY lorax_server lorax_server
RUN /opt/lorax/bin/pip install -c cuda-constraints.txt ".[gpu,otel,s3${RAY:+,ray}]"

# --- Run: no compiler, no sources, no root ---------------------------------------------------------------------------

FROM python:${PYTHON}-slim-bookworm AS run
# tini runs as process 1 and reaps orphaned processes.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
# /data holds downloaded models and adapters, and compiled kernels. It should be a volume.
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
# Triton compiles C code for each kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/lorax /opt/lorax
USER 10001

# The default target is the last one.
FROM run AS cpu
COPY --from=build-cpu /opt/lorax /opt/lorax
USER 10001
