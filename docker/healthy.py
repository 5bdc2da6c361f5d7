"""Check the health of a Flower process: `python healthy.py ADDRESS` of its health service."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    response = HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
sys.exit(response.status != HealthCheckResponse.SERVING)
