"""KEDA's external scaler (`gpuorch scaler`): scaling that reacts in about a second and needs no Prometheus.

KEDA calls four functions over gRPC (`protocol`). What they answer comes from `GET /autoscale/{pool_id}` of an
orchestrator, which a single thread asks every half second about all pools that anybody watches (`watch`): any number of
ScaledObjects costs the orchestrator one question per pool. A pool that gets its first job is told to KEDA at once, on a
stream that stays open.

What is not known is not answered: the orchestrator away is UNAVAILABLE, never "inactive", so that KEDA falls back
instead of ending workers that have jobs.

Needs the extra `scaler` (grpcio, protobuf); only this package imports them.
"""
