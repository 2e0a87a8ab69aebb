"""The HTTP edge, the only importer of FastAPI: one router per noun, handlers of about ten lines.

    server ─ runs ─▶ app ─ guard (Host, Origin) ─▶ router ─▶ Backend ─▶ Orchestrator
                      └ problems (every error as application/problem+json)

Handlers are coroutines and never block: what asks the database goes through `Backend.read` and
`Backend.write`, which run in named threads and give up after `db_timeout_s`, so that a frozen server costs a
503 and not a hang.
"""
