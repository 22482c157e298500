/* Names, arguments, strings and a command name that a terminal, a log or Rich would obey.
 *
 * The escape sequences are none that stapsdt writes itself. Fires every 10 ms, from the first line it reads until the end
 * of its input.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define NOTE(provider, name, arguments)                                                                               \
	__asm__ volatile("1: nop\n"                                                                                   \
			 ".pushsection .note.stapsdt,\"\",\"note\"\n"                                                 \
			 ".balign 4\n"                                                                                \
			 ".4byte 3f-2f, 5f-4f, 3\n"                                                                   \
			 "2: .asciz \"stapsdt\"\n"                                                                    \
			 "3: .balign 4\n"                                                                             \
			 "4: .8byte 1b, 0, 0\n"                                                                       \
			 ".asciz \"" provider "\"\n.asciz \"" name "\"\n.asciz \"" arguments "\"\n"                   \
			 "5: .balign 4\n"                                                                             \
			 ".popsection\n" ::"D"(text), "S"(count))

/* as gas and C read them: a title, a color, a cleared scrollback, C1 (UTF-8), a bidirectional override, Rich's markup */
#define EVIL_GAS "\\033]0;PWNED\\007\\033[7;35m\\nforged\\033[3J\\302\\2337m\\342\\200\\256rtl[bold red]x[/][link=http://x]y[/]"
#define EVIL_C "\033]0;PWNED\007\033[7;35m\r\nforged\t\033[3J\302\2337m\342\200\256rtl[bold red]x[/]\2337m"

int main(void)
{
	struct pollfd input = {.fd = 0, .events = POLLIN};
	char line[16], text[256];
	long count = 0;

	strcpy(text, "arg" EVIL_C);
	prctl(PR_SET_NAME, "c\033[7;35m\n\302\2337m");
	puts("ready");
	fflush(stdout);
	for (;;) {
		if (poll(&input, 1, 10) > 0 && read(0, line, sizeof line) <= 0)
			return 0;
		NOTE("evil", "begin", "8@%%rdi -8@%%rsi");
		NOTE("evil", "end", "8@%%rdi -8@%%rsi");
		NOTE("evil", "n" EVIL_GAS, "8@%%rdi -8@%%rsi");
		NOTE("evil" EVIL_GAS, "n", "8@%%rdi -8@%%rsi");
		NOTE("evil", "wrong", "8@%%rdi 8@\\033[7;35m\\nfoo\\302\\233");
		count++;
	}
}
