"""Exit with 0 if the gRPC health service at ADDRESS is serving: `python healthy.py ADDRESS`."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    response = HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
sys.exit(response.status != HealthCheckResponse.SERVING)
