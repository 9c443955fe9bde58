"""What the gateway's tests share: real services."""

from tests.gateway.services import _postgres_server, postgres_url, redis_url

__all__ = ["_postgres_server", "postgres_url", "redis_url"]
