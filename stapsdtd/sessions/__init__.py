"""Subscriptions: what is armed for them, and the way of their events from the engine to the clients.

Sink.deliver ──► Subscription: scope, sequence numbers ──► EventLog (bounded) ──► api.Stream
Registry changes ──► Subscriptions ──► Armer: which sites each one wants ──► Attacher ──► Engine.arm / disarm
"""
