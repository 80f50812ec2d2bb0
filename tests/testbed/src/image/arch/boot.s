# From the loader's 32-bit protected mode to 64-bit Rust on the boot stack.
#
# Two loaders are served: PVH (an ELF note names pvh_entry; EBX = start info) and
# multiboot2 (the ELF entry; EAX = magic, EBX = boot information). The page tables are
# data, built by the assembler: RAM below 2 GiB is cached, 2 GiB to 4 GiB is not. The
# first MiB, where loaders leave their information even in page zero, can also be read
# at 4 GiB, so that page zero itself need not be mapped.

    .section .note.Xen, "a", @note
    .balign 4
    .long 4                             # size of the name
    .long 8                             # size of the value
    .long 18                            # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_entry

    .section .multiboot2, "a"
    .balign 8
multiboot2_header:
    .long 0xe85250d6
    .long 0                             # i386, protected mode
    .long multiboot2_end - multiboot2_header
    .long 0x100000000 - (0xe85250d6 + (multiboot2_end - multiboot2_header))
    .short 0, 0                         # end tag
    .long 8
multiboot2_end:

    .section .text.boot, "ax"
    .code32
    .global multiboot2_entry
multiboot2_entry:
    mov edi, eax                        # the loader's magic tells Rust which one it was
    jmp enter_long_mode
pvh_entry:
    mov edi, 0
enter_long_mode:
    cli
    cld
    mov esp, offset stack_top
    mov esi, ebx

    mov eax, offset boot_pml4
    mov cr3, eax
    mov eax, cr4
    or eax, 0x620                       # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov ecx, 0xc0000080                 # EFER
    rdmsr
    or eax, 0x100                       # LME
    wrmsr
    mov eax, cr0
    and eax, 0xfffffff3                 # EM and TS off: SSE from the first instruction on
    or eax, 0x80010023                  # PG, WP, NE, MP, PE
    mov cr0, eax
    lgdt [boot_gdt_pointer]
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    xor eax, eax
    mov fs, ax
    mov gs, ax
    mov eax, 8
    push eax
    mov eax, offset long_mode
    push eax
    retf

    .code64
long_mode:
    mov edi, edi
    mov esi, esi
    lea rsp, [rip + stack_top]
    xor ebp, ebp
    call rust_entry
    ud2

# Where a further processor starts, in real mode. The code is copied to a page below
# 1 MiB, so it knows no address of its own. start.rs fills in its stack and its number.
    .section .rodata.trampoline, "a"
    .balign 8
    .code16
    .global trampoline_start, trampoline_end
trampoline_start:
    jmp 1f
    .balign 8                           # at offset 8: the boot code's descriptors
    .short 23
    .long boot_gdt
1:  cli
    cld
    mov ax, cs
    mov ds, ax
    lgdtd [8]
    mov eax, offset boot_pml4
    mov cr3, eax
    mov eax, 0x620                      # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov ecx, 0xc0000080                 # EFER
    rdmsr
    or eax, 0x100                       # LME
    wrmsr
    mov eax, 0x80010033                 # PG, WP, NE, ET, MP, PE: 64-bit mode at once
    mov cr0, eax
    .byte 0x66, 0xea                    # far jump to 8:further_processor
    .long further_processor
    .short 8
trampoline_end:

    .section .text.boot, "ax"
    .code64
further_processor:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    xor eax, eax
    mov fs, ax
    mov gs, ax
    mov rsp, [rip + further_stack]
    mov rdi, [rip + further_number]
    xor ebp, ebp
    call rust_further_entry
    ud2

    .section .data.boot, "aw"
    .balign 8
    .global further_stack, further_number
further_stack:
    .quad 0
further_number:
    .quad 0
    .balign 8
boot_gdt:
    .quad 0
    .quad 0x00af9b000000ffff            # 8: 64-bit code
    .quad 0x00cf93000000ffff            # 16: data
boot_gdt_pointer:
    .short 23
    .long boot_gdt

    .balign 4096
boot_pml4:
    .quad boot_pdpt + 0x3
    .zero 4088
boot_pdpt:
    .quad boot_pd + 0x0003, boot_pd + 0x1003, boot_pd + 0x2003, boot_pd + 0x3003
    .quad boot_pd_low + 0x1
    .zero 4056
boot_pd:                                # four tables of 512 large pages
    .quad boot_pt + 0x3                 # the first 2 MiB in small pages
    .set page, 1
    .rept 1023                          # to 2 GiB: present, writable, large
    .quad (page << 21) + 0x83
    .set page, page + 1
    .endr
    .rept 1024                          # to 4 GiB: also uncached (PCD, PWT)
    .quad (page << 21) + 0x9b
    .set page, page + 1
    .endr
boot_pt:
    .quad 0                             # nothing at the null address
    .set page, 1
    .rept 255
    .quad (page << 12) + 0x3
    .set page, page + 1
    .endr
    .quad 0                             # 1 MiB: the guard page below the stack
    .set page, 257
    .rept 152
    .quad (page << 12) + 0x3
    .set page, page + 1
    .endr
    .rept 3                             # a guard page and 32 pages for each further processor
    .quad 0
    .set page, page + 1
    .rept 32
    .quad (page << 12) + 0x3
    .set page, page + 1
    .endr
    .endr
    .rept 512 - 256 - 153 - 99
    .quad (page << 12) + 0x3
    .set page, page + 1
    .endr
boot_pd_low:                            # at 4 GiB: the first MiB again, read-only
    .quad boot_pt_low + 0x1
    .zero 4088
boot_pt_low:
    .set page, 0
    .rept 256
    .quad (page << 12) + 0x1
    .set page, page + 1
    .endr
    .zero 2048
