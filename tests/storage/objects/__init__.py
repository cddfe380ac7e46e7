"""Object storage, by a real server on this machine.

They run in a lane of their own, with RANKXFORM_OBJECTS=1: the processes of other tests are forked,
and none may be after a request was made (`rankxform.storage.objects`).
"""
