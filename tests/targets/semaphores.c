/*
 * Probes whose semaphores are at places that the kernel can count at, and at others. Notes are written by hand, since
 * sys/sdt.h has one for each nop. For each line of standard input it fires what is enabled and prints the semaphores;
 * for "again" it executes itself.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define IN_PROBES __attribute__((section(".probes")))

unsigned short in_data IN_PROBES, other IN_PROBES;
struct {
	unsigned short first;
	char between[1 << 16];
	unsigned short last;
} in_bss;

__attribute__((section(".data.rel.ro"))) unsigned short in_relro;

#define NOTE(name, semaphore)                                     \
	".pushsection .note.stapsdt, \"\", \"note\"\n"            \
	".balign 4\n"                                             \
	".4byte 992f-991f, 994f-993f, 3\n"                        \
	"991: .asciz \"stapsdt\"\n"                               \
	"992: .balign 4\n"                                        \
	"993: .8byte 990b, 0, " #semaphore "\n"                   \
	".asciz \"semaphores\"\n"                                 \
	".asciz \"" #name "\"\n"                                  \
	".asciz \"-4@$1\"\n"                                      \
	"994: .balign 4\n"                                        \
	".popsection\n"

static void fire(void)
{
	__asm__ volatile("990: nop\n" NOTE(data, in_data));
	__asm__ volatile("990: nop\n" NOTE(bss, in_bss));
	__asm__ volatile("990: nop\n" NOTE(beyond, in_bss + 65538));
	__asm__ volatile("990: nop\n" NOTE(relro, in_relro));
	__asm__ volatile("990: nop\n" NOTE(first, in_data) NOTE(second, other) NOTE(third, in_data) NOTE(fourth, 0));
}

int main(int count, char **arguments)
{
	volatile unsigned short *bss = &in_bss.first, *beyond = &in_bss.last, *data = &in_data, *second = &other, *relro = &in_relro;
	char line[16];

	(void)count;
	setvbuf(stdin, NULL, _IONBF, 0);
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (!strcmp(line, "again\n"))
			execv("/proc/self/exe", arguments);
		fire();
		printf("%d %d %d %d %d\n", *data, *second, *bss, *beyond, *relro);
		fflush(stdout);
	}
	return 0;
}
