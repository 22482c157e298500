"""Debian's kernels, booted under qemu on this host's files, for the tests to run on.

    kernels  a package of apt's, unpacked to .cache/vm: the kernel's image, and the modules that its root needs
    initrd   a first root, whose /init mounts the host's root below an overlay and runs one command in it
    guest    qemu with both; the command's output and exit status

Nothing is installed, and the guest writes to its own memory alone, but for one folder that it shares with the host.
With systemd, as users have it, it takes a disk:

    images     Debian's releases, each with this tree installed, as disks in .cache/vm
    installed  the tests that are marked `installed`, in guests that boot from these
"""
