"""Prompt styles of LitGPT beside Alpaca's; the formats are those of the models' authors."""

import json

from ftkit.models.chat_templates.prompt_styles import (
    INSTRUCTION,
    RESPOND,
    RESPONSE,
    TASK,
    WITH_CONTEXT,
    PromptStyle,
)

_HELPFUL = "You are a helpful assistant."
_FUNCTION = {
    "function": "search_bing",
    "description": "Search the web for content on Bing. This allows users to search online/the "
    "internet/the web for content.",
    "arguments": [{"name": "query", "type": "string", "description": "The search query string"}],
}
"""The example of a function in the style for calling functions, whose braces are doubled there."""


def _chatml(class_name: str, system: str = "", *, name: str, models: str = "") -> PromptStyle:
    return PromptStyle(
        name=name,
        class_name=class_name,
        models=models,
        before_system="<|im_start|>system\n",
        after_system="<|im_end|>\n",
        system=system,
        before="<|im_start|>user\n",
        after="<|im_end|>\n<|im_start|>assistant\n",
    )


ROWS = (
    PromptStyle(
        name="flan",
        class_name="FLAN",
        system=f"{TASK}. {RESPOND}",
        before=INSTRUCTION,
        after=RESPONSE,
    ),
    PromptStyle(
        name="longform",
        class_name="Longform",
        system=f"{WITH_CONTEXT}{RESPOND}",
        before=INSTRUCTION,
        after=RESPONSE,
    ),
    _chatml("ChatML", name="ChatML"),
    PromptStyle(
        name="stablelm-alpha",
        models=r"stablelm-tuned-alpha",
        class_name="StableLMAlpha",
        before_system="<|SYSTEM|>",
        system="# StableLM Tuned (Alpha version)\n"
        "- StableLM is a helpful and harmless open-source AI language model developed by "
        "StabilityAI.\n"
        "- StableLM is excited to be able to help the user, but will refuse to do anything "
        "that could be considered harmful to the user.\n"
        "- StableLM is more than just an information source, StableLM is also able to write "
        "poetry, short stories, and make jokes.\n"
        "- StableLM will refuse to participate in anything that could harm a human.",
        before="<|USER|>",
        after="<|ASSISTANT|>",
        stops=("<|SYSTEM|>", "<|ASSISTANT|>", "<|USER|>"),
    ),
    PromptStyle(
        name="stablelm-zephyr",
        models=r"stablelm-zephyr-3b",
        class_name="StableLMZephyr",
        has_system=False,
        before="<|user|>\n",
        after="<|endoftext|>\n<|assistant|>\n",
    ),
    PromptStyle(
        name="stablecode",
        models=r"stablecode-instruct",
        class_name="StableCode",
        has_system=False,
        before="###Instruction\n",
        after="###Response\n",
    ),
    PromptStyle(
        name="Falcon3",
        models=r"Falcon3.*-Instruct",
        class_name="Falcon3",
        has_system=False,
        stops=("<|endoftext|>",),
        before="<|user|>\n",
        after="<|endoftext|>\n<|assistant|>\n",
    ),
    PromptStyle(
        name="falcon",
        models=r"falcon.*-instruct",
        class_name="Falcon",
        has_system=False,
        after="\nAnswer:",
    ),
    PromptStyle(
        name="llama2-function-calling",
        models=r"Llama-2-7b-chat-hf-function-calling-v2",
        class_name="Llama2FunctionCalling",
        start="<FUNCTIONS>"
        + json.dumps(_FUNCTION).replace("{", "{{").replace("}", "}}")
        + "</FUNCTIONS>\n\n[INST]",
        before_system="<<SYS>>\n",
        after_system="\n<</SYS>>\n\n",
        system="You are a helpful, respectful and honest assistant. Always answer as helpfully "
        # The missing space is LitGPT's.
        "aspossible. Your only response should be JSON formatted functions",
        strips_system=True,
        after="[/INST]\n\n",
    ),
    PromptStyle(
        name="llama2",
        models=r"Llama-2.*-chat",
        class_name="Llama2",
        start="[INST] ",
        before_system="<<SYS>>\n",
        after_system="\n<</SYS>>\n\n",
        system="You are a helpful, respectful and honest assistant. Always answer as helpfully "
        "as possible, while being safe.  Your answers should not include any harmful, "
        "unethical, racist, sexist, toxic, dangerous, or illegal content. Please ensure that "
        "your responses are socially unbiased and positive in nature.\n\nIf a question does "
        "not make any sense, or is not factually coherent, explain why instead of answering "
        "something not correct. If you don't know the answer to a question, please don't share "
        "false information.",
        before=" ",
        after=" [/INST] ",
    ),
    PromptStyle(
        name="llama3",
        models=r"Llama-3.*-Instruct|OLMo-2.*-(Instruct|SFT|DPO)",
        class_name="Llama3",
        start="<|begin_of_text|>",
        before_system="<|start_header_id|>system<|end_header_id|>\n\n",
        after_system="<|eot_id|>",
        system=_HELPFUL,
        before="<|start_header_id|>user<|end_header_id|>\n\n",
        after="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        before_later="<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        stops=("<|eot_id|>",),
    ),
    PromptStyle(
        name="R1Base",
        models=r"R1",
        class_name="R1Base",
        before="<｜User｜>",
        after="<｜Assistant｜>",
        stops=("<｜end▁of▁sentence｜>",),
    ),
    PromptStyle(
        name="freewilly2",
        models=r"FreeWilly2",
        class_name="FreeWilly2",
        before_system="### System:\n",
        after_system="\n\n",
        system="This is a system prompt, please behave and help the user.",
        before="### User:\n",
        after="\n\n### Assistant:\n",
    ),
    PromptStyle(
        name="platypus",
        models=r"Platypus",
        class_name="Platypus",
        has_system=False,
        before="### Instruction:\n\n",
        after=RESPONSE,
    ),
    PromptStyle(
        name="codellama",
        models=r"CodeLlama|Mi[sx]tral.*Instruct",
        class_name="CodeLlama",
        start="[INST] ",
        before_system="<<SYS>>\n",
        after_system="\n<</SYS>>\n\n",
        after=" [/INST]",
    ),
    PromptStyle(
        name="phi-1", models=r"phi-1", class_name="Phi1", has_system=False, after="\n\nAnswer:"
    ),
    PromptStyle(
        name="phi-2",
        models=r"phi-2",
        class_name="Phi2",
        has_system=False,
        before="Instruct: ",
        after="\nOutput:",
    ),
    PromptStyle(
        name="phi-3",
        models=r"Phi-3",
        class_name="Phi3",
        before_system="<|system|>\n",
        after_system="<|end|>\n",
        system=_HELPFUL,
        before="<|user|>\n",
        after="<|end|>\n<|assistant|>\n",
    ),
    PromptStyle(
        name="phi-4-reasoning",
        models=r"Phi-4-reasoning",
        class_name="Phi4Reasoning",
        before_system="<|im_start>system<|im_sep|>",  # without the second bar, as LitGPT has it
        after_system="<|im_end|>",
        system="You are Phi, a language model trained by Microsoft to help users. Your role as "
        "an assistant involves thoroughly exploring questions through a systematic thinking "
        "process before providing the final precise and accurate solutions. This requires "
        "engaging in a comprehensive cycle of analysis, summarizing, exploration, "
        "reassessment, reflection, backtracing, and iteration to develop well-considered "
        "thinking process. Please structure your response into two main sections: Thought and "
        "Solution using the specified format: <think> {Thought section} </think> {Solution "
        "section}. In the Thought section, detail your reasoning process in steps. Each step "
        "should include detailed considerations such as analysing questions, summarizing "
        "relevant findings, brainstorming new ideas, verifying the accuracy of the current "
        "steps, refining any errors, and revisiting previous steps. In the Solution section, "
        "based on various attempts, explorations, and reflections from the Thought section, "
        "systematically present the final solution that you deem correct. The Solution section "
        "should be logical, accurate, and concise and detail necessary steps needed to reach "
        "the conclusion. Now, try to solve the following question through the above "
        "guidelines:",
        before="<|im_start|>user<|im_sep|>",
        after="<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    PromptStyle(
        name="phi-4-mini-reasoning",
        models=r"Phi-4-mini-reasoning",
        class_name="Phi4MiniReasoning",
        before_system="<|system|>",
        after_system="<|end|>",
        system="Your name is Phi, an AI math expert developed by Microsoft.",
        before="<|user|>",
        after="<|end|><|assistant|>",
    ),
    PromptStyle(
        name="phi-4-mini",
        models=r"Phi-4-mini",
        class_name="Phi4Mini",
        before_system="<|system|>",
        after_system="<|end|>",
        before="<|user|>",
        after="<|end|><|assistant|>",
    ),
    PromptStyle(
        name="phi-4",
        models=r"phi-4",
        class_name="Phi4",
        before_system="<|im_start|>system<|im_sep|>",
        after_system="<|im_end|>",
        before="<|im_start|>user<|im_sep|>",
        after="<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    PromptStyle(
        name="tinyllama",
        models=r"tiny-llama.*chat",
        class_name="TinyLlama",
        before_system="<|system|>\n",
        after_system="</s>\n",
        system="You are a friendly chatbot who always gives helpful, detailed, and polite answers.",
        before="<|user|>\n",
        after="</s>\n<|assistant|>\n",
    ),
    PromptStyle(
        name="gemma",
        models=r"(Code)?Gemma.*-it",
        class_name="Gemma",
        has_system=False,
        before="<start_of_turn>user\n",
        after="<end_of_turn>\n<start_of_turn>model\n",
    ),
    PromptStyle(
        name="olmo",
        models=r"OLMo.*-hf",
        class_name="OLMo",
        has_system=False,
        before="<|endoftext|><|user|>\n",
        after="\n<|assistant|>\n",
    ),
    _chatml(
        "Qwen2_5_Math",
        "Please reason step by step, and put your final answer within \\boxed{}.",
        name="qwen2.5-math",
        models=r"Qwen2\.5-Math-",
    ),
    _chatml(
        "Qwen2_5",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        name="qwen2.5",
        models=r"Qwen2\.5-",
    ),
    _chatml(
        "QwQ",
        "You are a helpful and harmless assistant. You are Qwen developed by Alibaba. You "
        "should think step-by-step.",
        name="qwq",
        models=r"QwQ-",
    ),
    _chatml(
        "Qwen3",
        name="qwen3",
        models=r"Qwen3-",
    ),
    _chatml(
        "SmolLM2",
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        name="smollm2",
        models=r"SmolLM2.*-Instruct",
    ),
    _chatml(
        "Salamandra",
        "I am Salamandra, an AI language model developed at the Barcelona Supercomputing "
        "Centre (BSC) by the Language Technologies Unit. My knowledge base was last updated on "
        "August 2023. Today Date: 2024-09-30\n"
        "Soy Salamandra, un modelo lingüístico de IA desarrollado en el Barcelona "
        "Supercomputing Centre (BSC) por la Language Technologies Unit. Mi base de "
        "conocimientos se actualizó por última vez en agosto de 2023.\n"
        "Soc Salamandra, un model de llenguatge d'IA desenvolupat al Barcelona Supercomputing "
        "Centre (BSC) per la Language Technologies Unit.",
        name="salamandra",
        models=r"salamandra-.*-instruct",
    ),
)
"""In the order of LitGPT, where several match the name of a model: Phi-4-mini also matches
Phi-4-mini-reasoning, which stands before it."""
