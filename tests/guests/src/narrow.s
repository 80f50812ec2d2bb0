# A 32-bit guest. Each step that does not give what it must ends the guest as a crash,
# with the number of the step on the console.

    .section .note.Xen, "a", @note
    .balign 4
    .long 4                             # size of the name
    .long 4                             # size of the value: the short form
    .long 18                            # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long pvh_entry

    .macro expect value, where:vararg
    inc dword ptr [step]
    cmp \where, \value
    jne failed
    .endm

    # Hypercall number, then its arguments from the second on in ebx, ecx, edx.
    .macro hypercall number
    mov eax, offset hypercalls + 32 * \number
    call eax
    .endm

    .macro print text, length
    xor ebx, ebx
    mov ecx, \length
    mov edx, offset \text
    hypercall 18
    .endm

    .section .text.entry, "ax"
    .code32
    .global pvh_entry
pvh_entry:
    cli
    cld
    mov esp, offset stack_top
    mov ebp, ebx                        # the start information

    # Own segments, a task segment, gates.
    lgdt [segments_pointer]
    mov eax, 8
    push eax
    mov eax, offset own_segments
    push eax
    retf
own_segments:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov eax, offset task
    mov [task_descriptor + 2], ax
    shr eax, 16
    mov [task_descriptor + 4], al
    mov ax, 40
    ltr ax
    mov eax, offset undefined_handler
    mov [gate_undefined], ax
    shr eax, 16
    mov [gate_undefined + 6], ax
    mov eax, offset back_from_user
    mov [gate_back], ax
    shr eax, 16
    mov [gate_back + 6], ax
    lidt [gates_pointer]

    # Paging in the extended format.
    mov eax, cr4
    or eax, 0x20                        # PAE
    mov cr4, eax
    mov eax, offset directories
    mov cr3, eax
    mov eax, cr0
    or eax, 0x80010000                  # PG, WP
    mov cr0, eax

    expect 0x336ec578, dword ptr [ebp]
    mov eax, 0x40000000
    cpuid
    expect 0x566e6558, ebx              # XenV
    mov eax, 0x40000002
    cpuid
    mov ecx, ebx
    mov eax, offset hypercalls
    xor edx, edx
    wrmsr
    expect 0xb8, byte ptr [hypercalls]
    print hello, 14
    expect 0, eax
    mov eax, 0x40000004
    cpuid
    mov [domain], cx

    # A prefix for forced emulation is undefined here.
    ud2
    .ascii "xen"
    cpuid
    expect 1, dword ptr [undefined]

    # A call from user code is refused.
    mov eax, 0x23
    push eax                            # ss
    mov eax, offset user_stack_top
    push eax
    pushfd
    mov eax, 0x1b
    push eax                            # cs
    mov eax, offset user
    push eax
    iretd
user:
    mov ax, 0x23
    mov ds, ax
    mov es, ax
    xor ebx, ebx
    hypercall 17
    int 0x20
back_from_user:
    mov cx, 16
    mov ds, cx
    mov es, cx
    expect -1, eax
    xor ebx, ebx
    hypercall 17
    expect 0x40011, eax

    # The page of shared information, in the narrow layout.
    mov ebx, 7
    mov ecx, offset place_shared_info
    mov eax, offset shared_info
    shr eax, 12
    mov [place_shared_info + 12], eax
    hypercall 12
    expect 0, eax
    cmp dword ptr [shared_info + 56], 0
    je failed                           # the rate of the clock

    # The grant table: its version, its first frame, the narrow list of frames.
    mov dword ptr [version], 1
    call set_version
    expect 0, eax
    mov eax, offset table
    shr eax, 12
    mov [place_table + 12], eax
    mov ebx, 7
    mov ecx, offset place_table
    hypercall 12
    expect 0, eax
    mov ebx, 2
    mov ecx, offset setup
    mov edx, 1
    hypercall 20
    expect 0, eax
    expect 0, word ptr [setup + 8]
    mov eax, offset table
    shr eax, 12
    expect eax, [frames]
    expect -1, dword ptr [frames + 4]
    expect 0x77777777, dword ptr [frames + 8]

    # An own page, granted and mapped.
    mov eax, offset granted
    mov dword ptr [eax], 0xabcd1234
    shr eax, 12
    mov [table + 8 * 8 + 4], eax
    mov ax, [domain]
    mov [table + 8 * 8 + 2], ax
    mov [map + 16], ax
    mov word ptr [table + 8 * 8], 1
    mov ebx, 0
    mov ecx, offset map
    mov edx, 1
    hypercall 20
    expect 0, eax
    expect 0, word ptr [map + 18]
    expect 0x19, word ptr [table + 8 * 8]
    expect 0xabcd1234, dword ptr [window]
    mov eax, [map + 20]
    mov [unmap + 16], eax
    mov ebx, 1
    mov ecx, offset unmap
    mov edx, 1
    hypercall 20
    expect 0, eax
    expect 0, word ptr [unmap + 20]
    expect 1, word ptr [table + 8 * 8]

    # A copy between two frames of its own, by their numbers.
    mov eax, offset source
    mov dword ptr [eax + 8], 0x600df00d
    shr eax, 12
    mov [copy], eax
    mov eax, offset target
    shr eax, 12
    mov [copy + 8], eax
    mov ebx, 5
    mov ecx, offset copy
    mov edx, 1
    hypercall 20
    expect 0, eax
    expect 0, word ptr [copy + 20]
    expect 0x600df00d, dword ptr [target + 16]

    # Version 2: a frame of status words, its list, and what holds the version back.
    mov dword ptr [version], 2
    call set_version
    expect 0, eax
    mov eax, offset statuses
    shr eax, 12
    mov [place_statuses + 12], eax
    mov [remove_statuses + 4], eax
    mov ebx, 7
    mov ecx, offset place_statuses
    hypercall 12
    expect 0, eax
    mov ebx, 9
    mov ecx, offset list_statuses
    mov edx, 1
    hypercall 20
    expect 0, eax
    expect 0, word ptr [list_statuses + 6]
    mov eax, offset statuses
    shr eax, 12
    expect eax, [frames]
    expect 0, dword ptr [frames + 4]
    mov dword ptr [version], 1
    call set_version
    expect -16, eax
    mov ebx, 15
    mov ecx, offset remove_statuses
    hypercall 12
    expect 0, eax
    mov dword ptr [version], 1
    call set_version
    expect 0, eax

    # A pointer that leads nowhere in the guest's own tables.
    mov dword ptr [tables + 8 * 5], 0
    mov eax, cr3
    mov cr3, eax
    mov ebx, 1
    mov ecx, 5 << 21
    hypercall 17
    expect -14, eax

    # Without paging, and on large pages of the old format.
    mov eax, cr0
    and eax, 0x7fffffff
    mov cr0, eax
    print without, 18
    expect 0, eax
    mov eax, cr4
    and eax, 0xffffffdf
    or eax, 0x10                        # PSE
    mov cr4, eax
    mov eax, offset old_directory
    mov cr3, eax
    mov eax, cr0
    or eax, 0x80000000
    mov cr0, eax
    print old, 20
    expect 0, eax

    mov ecx, offset off
    jmp shut_down

failed:
    mov eax, [step]
    mov cl, 10
    div cl
    add ax, 0x3030
    mov [number], ax
    print failure, 16
    mov ecx, offset crash
shut_down:
    mov ebx, 2
    hypercall 29
    cli
    hlt

set_version:
    mov ebx, 8
    mov ecx, offset version
    mov edx, 1
    hypercall 20
    ret

undefined_handler:
    inc dword ptr [undefined]
    add dword ptr [esp], 5
    iretd

    .section .data.entry, "aw"
hello:   .ascii "narrow: hello\n"
without: .ascii "narrow: no tables\n"
old:     .ascii "narrow: large pages\n"
failure: .ascii "narrow: step "
number:  .ascii "00\n"
    .balign 16
step:        .long 0
undefined:   .long 0
domain:      .long 0
version:     .long 0
off:         .long 0
crash:       .long 3
    # Domain (self), size, space, index, frame.
place_shared_info: .short 0x7ff0, 0; .long 0, 0, 0
place_table:       .short 0x7ff0, 0; .long 1, 0, 0
place_statuses:    .short 0x7ff0, 0; .long 1, 0x80000000, 0
remove_statuses:   .short 0x7ff0, 0; .long 0
    # Domain, frames, status, list.
setup:             .short 0x7ff0, 0; .long 2; .short 99, 0; .long frames
    # Frames, domain, status, list.
list_statuses:     .long 1; .short 0x7ff0, 99; .long frames
frames:            .long 0x77777777, 0x77777777, 0x77777777, 0x77777777
    .balign 8
map:   .long window, 0, 2, 8; .short 0, 99; .long 0, 0, 0
unmap: .long window, 0, 0, 0, 0; .short 99, 0
    # Frame, domain (self), offset, twice; length, flags, status.
copy:  .long 0; .short 0x7ff0, 8; .long 0; .short 0x7ff0, 16; .short 4, 0, 99, 0

    .balign 8
segments:
    .quad 0
    .quad 0x00cf9b000000ffff            # 8: code
    .quad 0x00cf93000000ffff            # 16: data
    .quad 0x00cffb000000ffff            # 24: user code
    .quad 0x00cff3000000ffff            # 32: user data
task_descriptor:
    .quad 0x0000890000000067            # 40: the task segment
segments_pointer:
    .short 47
    .long segments
    .balign 8
gates:
    .zero 6 * 8
gate_undefined:
    .short 0, 8, 0x8e00, 0
    .zero 25 * 8
gate_back:                              # vector 0x20, for user code
    .short 0, 8, 0xee00, 0
gates_pointer:
    .short 33 * 8 - 1
    .long gates
    .balign 16
task:
    .long 0, stack_top, 16
    .zero 0x68 - 12

    .balign 32
directories:
    .quad tables + 0x0001, tables + 0x1001, tables + 0x2001, tables + 0x3001
    .balign 4096
tables:                                 # 4 GiB in pages of 2 MiB, for user code as well
    .set page, 0
    .rept 2048
    .quad (page << 21) + 0x87
    .set page, page + 1
    .endr
old_directory:                          # 4 GiB in pages of 4 MiB
    .set page, 0
    .rept 1024
    .long (page << 22) + 0x87
    .set page, page + 1
    .endr

    .section .bss.entry, "aw", @nobits
    .balign 4096
hypercalls:  .zero 4096
shared_info: .zero 4096
table:       .zero 4096
statuses:    .zero 4096
granted:     .zero 4096
window:      .zero 4096
source:      .zero 4096
target:      .zero 4096
    .zero 4096
user_stack_top:
    .zero 16384
stack_top:
