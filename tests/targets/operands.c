/*
 * Probes whose arguments are harder to come by. It does what it is told on standard input, and answers each command
 * with one line, "COMMAND 0".
 *
 *   cold PATH       fire operands:text(the file's content, its length), in memory that was never touched
 *   twelve          fire operands:twelve(1, -2, 3, ... -12)
 *   bytes           fire operands:bytes with a value of 12 bytes, "ABCDEFGHIJK" and a NUL, and 7
 */
#include <sys/sdt.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void cold(const char *path)
{
	struct stat status;
	int descriptor = open(path, O_RDONLY);
	char *content;

	if (descriptor < 0 || fstat(descriptor, &status))
		abort();
	content = mmap(NULL, status.st_size + 1, PROT_READ, MAP_PRIVATE, descriptor, 0);
	STAP_PROBE2(operands, text, content, (int)status.st_size);
	munmap(content, status.st_size + 1);
	close(descriptor);
}

static void twelve(void)
{
	volatile int v = 1;

	STAP_PROBE12(operands, twelve, v, -2 * v, 3 * v, -4 * v, 5 * v, -6 * v, 7 * v, -8 * v, 9 * v, -10 * v, 11 * v,
		     -12 * v);
}

/* sys/sdt.h has no way to pass a struct, so this note is written by hand. */
static void bytes(void)
{
	struct { char content[12]; } value = { "ABCDEFGHIJK" };

	__asm__ volatile("990: nop\n"
			 ".pushsection .note.stapsdt, \"\", \"note\"\n"
			 ".balign 4\n"
			 ".4byte 992f-991f, 994f-993f, 3\n"
			 "991: .asciz \"stapsdt\"\n"
			 "992: .balign 4\n"
			 "993: .8byte 990b, _.stapsdt.base, 0\n"
			 ".asciz \"operands\"\n"
			 ".asciz \"bytes\"\n"
			 ".asciz \"12@%0 4@$7\"\n"
			 "994: .balign 4\n"
			 ".popsection\n"
			 : : "m"(value));
}

int main(void)
{
	static char line[4096];

	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "cold ", 5))
			cold(line + 5);
		else if (!strcmp(line, "twelve"))
			twelve();
		else if (!strcmp(line, "bytes"))
			bytes();
		printf("%.20s 0\n", line);
	}
	return 0;
}
