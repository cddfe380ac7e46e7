"""Metadata is in setup.cfg. Two builds of one commit are equal where SOURCE_DATE_EPOCH is set.

Wheels are so by setuptools; of an sdist the times of files, their owners and the time of its
compression are set here.
"""

import gzip
import io
import os
import tarfile

from setuptools import setup
from setuptools.command.sdist import sdist


class ReproducibleSdist(sdist):
    def make_archive(self, base_name, format, *args, **options):
        path = super().make_archive(base_name, format, *args, **options)
        date = os.environ.get("SOURCE_DATE_EPOCH")
        if date is not None and path.endswith(".tar.gz"):
            with open(path, "rb") as file:
                data = file.read()
            with open(path, "wb") as file:
                file.write(with_time(data, int(date)))
        return path


def with_time(data, time):
    """Return a compressed archive with one time and no owners, its members in order."""
    rewritten = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        tarfile.open(fileobj=rewritten, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid = time, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(rewritten.getvalue(), mtime=time)


setup(cmdclass={"sdist": ReproducibleSdist})
