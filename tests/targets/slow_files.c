/* A file system that can be told to hang: slow_files SOURCE CONTROL [option of FUSE…] MOUNTPOINT serves MOUNTPOINT/file, with what is in
 * SOURCE. While the file CONTROL holds the name of an operation (getattr, open, read), those wait; while it holds the word direct,
 * what is opened is for direct I/O.
 */
#define FUSE_USE_VERSION 31
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int source;
static const char *control;

static int is_told(const char *word)
{
	char told[64] = "";
	int file = open(control, O_RDONLY);

	if (file < 0)
		return 0;
	if (read(file, told, sizeof told - 1) < 0)
		told[0] = 0;
	close(file);
	return strstr(told, word) != NULL;
}

static void wait_while_told(const char *operation)
{
	while (is_told(operation))
		usleep(5000);
}

static int slow_getattr(const char *path, struct stat *status, struct fuse_file_info *info)
{
	(void)info;
	if (!strcmp(path, "/")) {
		memset(status, 0, sizeof *status);
		status->st_mode = S_IFDIR | 0755;
		status->st_nlink = 2;
		return 0;
	}
	if (strcmp(path, "/file"))
		return -ENOENT;
	wait_while_told("getattr");
	if (fstat(source, status))
		return -errno;
	return 0;
}

static int slow_open(const char *path, struct fuse_file_info *info)
{
	(void)path;
	wait_while_told("open");
	info->direct_io = is_told("direct");
	/* else open itself waits for the pages that others read, and mmap has none to wait for */
	info->keep_cache = info->direct_io;
	return 0;
}

static int slow_read(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *info)
{
	ssize_t count;

	(void)path, (void)info;
	wait_while_told("read");
	count = pread(source, data, size, offset);
	return count < 0 ? -errno : (int)count;
}

int main(int argc, char **argv)
{
	static const struct fuse_operations operations = {
		.getattr = slow_getattr,
		.open = slow_open,
		.read = slow_read,
	};

	if (argc < 4)
		return 2;
	source = open(argv[1], O_RDONLY);
	control = argv[2];
	if (source < 0)
		return 1;
	argv[2] = argv[0];
	return fuse_main(argc - 2, argv + 2, &operations, 0);
}
