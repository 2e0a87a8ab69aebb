"""Delivery: everything in Redis (or Valkey), and the only importer of redis.

Nothing here is the truth but the events on their way in, which stand nowhere else until their jobs are stored; every
other key can be lost. The lanes are rebuilt from the database; the dead letters only repeat what the rows say, and a
bell that nobody heard costs a moment.

| key (after the prefix, by default `stream:orchestrator:`) | type | meaning | written by |
|---|---|---|---|
| `inference_jobs` | stream | window of the default lane; fields `job_id`, `type`, `trace` | publisher |
| `inference_jobs:POOL` | stream | window of a pool's own lane | publisher |
| `{STREAM}:epoch` | string | highest leader epoch that touched a lane or `dlq`; older ones are refused | leader |
| `{STREAM}:aside:TIME` | any | what stood in place of a lane and was no stream; kept for its owner | publisher |
| `ingest_events` | stream | events that become jobs: `type`, `payload` (JSON), perhaps `event_id` | other programs |
| `dlq` | stream | dead letters: `job_id`, `origin_id`, `attempts`, `last_error`, `reason` | leader, workers, ingest |
| `control` | stream | a bell: whoever hears it looks into the database now; field `what` | API, leader |
| `preloads` | stream | a bell for the leader, who looks at the pools now; field `pool_id` | API, workers |

Workers tell `dlq` (`stream.dead_letters`) only of entries that name no job, ingest of events of which no job can be
made; the API takes back what was redriven or purged. `writable` is never created: writing no byte to it shows whether
the server takes writes.

Groups: `cg:inference` on the default lane, `cg:inference:POOL` on a pool's, `cg:ingest:orchestrator` on the events,
`cg:preloads:workers` on `preloads`. A consumer is the id of a worker or an orchestrator, which is new at every start,
so that nobody inherits entries by accident.

Reads that wait have a connection of their own (`stream.ear`), and end when their thread is told to stop, through CLIENT
ID and CLIENT UNBLOCK. A user who may not call those waits for the end of each such read, `redis_block_ms` at most.

An entry is announced once under an id of its own. Acknowledging deletes it. A job that is announced again gets a
new entry, so a late acknowledgement of the old one cannot hurt.
"""
