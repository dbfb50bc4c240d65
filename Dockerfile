# Images of jpaged, with a CPU target and a CUDA 13 target:
#   docker build --target cpu -t jpaged:cpu .
#   docker build --target cuda13 -t jpaged:cuda13 .
# The CUDA libraries come with JAX's plugin. The host needs only the driver (580 or later) and the
# NVIDIA container toolkit.
FROM python:3.12-slim AS base
RUN useradd --create-home --uid 1000 jpaged
ENV PATH=/opt/jpaged/bin:$PATH
WORKDIR /home/jpaged
EXPOSE 8000
# The start may compile programs, so failures count only after ten minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["jpaged"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS cpu
COPY . /src
RUN sh /src/docker/install.sh /opt/jpaged /src && rm -r /src
USER jpaged

FROM base AS cuda13
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . /src
RUN sh /src/docker/install.sh /opt/jpaged "/src[cuda13]" && rm -r /src
USER jpaged
