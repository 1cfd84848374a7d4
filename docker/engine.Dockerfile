# syntax=docker/dockerfile:1
# The example engine, which stands where yours will: torch for the CPU, the cache, and the worker's end of the link.
#   docker build -f docker/engine.Dockerfile -t kvevents-engine:0.1.0 .
ARG PYTHON_IMAGE=python:3.13-slim-trixie

FROM ${PYTHON_IMAGE} AS build
ARG SOURCE_DATE_EPOCH=0
# Builds of torch for the CPU: 2.13.0+cpu goes before 2.13.0 of PyPI, which brings CUDA along. A page of links to
# wheels, or a folder of them.
ARG TORCH_LINKS=https://download.pytorch.org/whl/cpu/torch/
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt setuptools \
    && python -m venv --without-pip /opt/kvevents \
    && pip --python /opt/kvevents/bin/python install --constraint constraints.txt --find-links "${TORCH_LINKS}" torch
COPY pyproject.toml README.md LICENSE ./
COPY kvevents kvevents
COPY publisher publisher
COPY hicache hicache
RUN pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
    && pip --python /opt/kvevents/bin/python install --constraint constraints.txt --find-links /wheels \
        'kvevents[demo]'

FROM ${PYTHON_IMAGE}
ARG SOURCE_DATE_EPOCH=0
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvevents-engine" \
      org.opencontainers.image.description="A small example of an LLM inference worker with a hierarchical KV cache" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 kvevents \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /var/lib/kvevents \
        --shell /usr/sbin/nologin kvevents \
    && install -d -o 10001 -g 10001 -m 0700 /run/kvevents /var/lib/kvevents
COPY --from=build /opt/kvevents /opt/kvevents
COPY examples /opt/engine/examples
ENV PATH=/opt/kvevents/bin:$PATH \
    PYTHONPATH=/opt/engine \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEALTH_URL=http://127.0.0.1:8000/health
USER 10001:10001
WORKDIR /var/lib/kvevents
VOLUME ["/run/kvevents", "/var/lib/kvevents"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=2)"]
ENTRYPOINT ["python", "-m", "examples.engine"]
CMD ["--host", "0.0.0.0", "--port", "8000"]
