"""Prometheus metrics of the daemon. Nothing here runs except during a scrape.

Sources ──► StapsdtdCollector ──► prometheus_client ──► Exporter, a thread of its own ──► GET /metrics
"""
