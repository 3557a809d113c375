"""Runs, models and recipes at urls of object storage: Amazon S3, Google Cloud Storage, Azure."""

LIBRARIES = {"adlfs": "az", "gcsfs": "gs", "s3fs": "s3"}
MOVED = {
    "ftkit.runs.sync.background": "background",
    "ftkit.runs.sync.claim": "claim",
    "ftkit.runs.sync.download": "download",
    "ftkit.runs.sync.mirror": "mirror",
    "ftkit.runs.sync.session": "session",
    "ftkit.utils.remote.objects": "objects",
    "ftkit.utils.remote.providers": "providers",
    "ftkit.utils.remote.ranges": "ranges",
    "ftkit.utils.remote.replica": "replica",
}
