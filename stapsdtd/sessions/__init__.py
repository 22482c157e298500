"""Subscriptions: what is armed for them, and the way of their events from the engine to the clients.

EventSink.deliver: quota, fairness ──► EventLog: sequence numbers, bounded ──► api.stream
Registry changes ──► ObjectFollower: which sites each one wants ──► Armer ──► Attacher ──► Engine.arm / disarm
"""
