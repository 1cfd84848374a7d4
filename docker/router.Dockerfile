# syntax=docker/dockerfile:1
# vllm-router from PyPI, in the version that the project is tested with.
#   docker build -f docker/router.Dockerfile -t kvevents-router:0.1.17 .
ARG PYTHON_IMAGE=python:3.13-slim-trixie

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvevents-router" \
      org.opencontainers.image.description="vllm-router, as its authors publish it on PyPI" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY tests/interop/requirements-vllm-router.txt /tmp/requirements.txt
RUN pip install --only-binary :all: --requirement /tmp/requirements.txt
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEALTH_URL=http://127.0.0.1:30000/health
USER 10001:10001
WORKDIR /tmp
EXPOSE 30000 29000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=2)"]
ENTRYPOINT ["python", "-m", "vllm_router.launch_router"]
CMD ["--help"]
