"""The bundled checkpoint: small enough to ship, loads like any other, and speaks English."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bench.bundled_model.corpus import DialogueMaker, Document, encode_conversation
from bench.bundled_model.model import SPECIAL_TOKENS
from engine.bundled import checkpoint_path

MAX_BYTES = 8_000_000
# Lewis Carroll, Alice's Adventures in Wonderland (1865): not among the texts it was trained on.
UNSEEN = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had "
    "no pictures or conversations in it, and what is the use of a book, thought Alice, without "
    "pictures or conversations? So she was considering in her own mind, as well as she could, for "
    "the hot day made her feel very sleepy and stupid, whether the pleasure of making a "
    "daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly "
    "a White Rabbit with pink eyes ran close by her."
)
# Charles Dickens, A Tale of Two Cities (1859).
UNSEEN_BEFORE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of Light, it was the season of Darkness, it was the spring of hope, it was the winter "
    "of despair. "
)
# ln(3072) = 8.03 is the loss of a model that knows nothing; one that knows only how frequent each
# token is stays above 6 here.
MAX_UNSEEN_LOSS = 4.8
PROMPTS = ("It was a fine morning in May, and", "And the king said unto his servants,")


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    yield loaded.eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint_path())


def greedy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str, new_tokens: int
) -> list[int]:
    """The new tokens after `text`, which is encoded as it stands."""
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(
        **tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    new: list[int] = output[0, tokens["input_ids"].shape[1] :].tolist()
    return new


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, tokens: list[int]) -> float:
    batch = torch.tensor([tokens])
    return float(model(input_ids=batch, labels=batch).loss)


def test_whole_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in checkpoint_path().iterdir()) <= MAX_BYTES


@pytest.mark.processes
def test_finding_the_checkpoint_needs_no_torch() -> None:
    program = (
        "import sys, engine.bundled as b; b.checkpoint_path(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_architecture_is_a_llama_with_grouped_queries_in_bf16(model: LlamaForCausalLM) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert 1 < model.config.num_key_value_heads < model.config.num_attention_heads
    stored = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype="auto")
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.bfloat16}


def test_special_tokens_agree_between_the_files(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    end_of_turn = tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, end_of_turn]
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer("text")["input_ids"][0] == tokenizer.bos_token_id


@settings(max_examples=100, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_chat_template_renders_roles_and_the_generation_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ("<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>")


def test_trained_on_the_very_tokens_that_the_chat_template_gives(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "user", "content": "How do you do?"},
        {"role": "assistant", "content": "Very well, I thank you."},
    ]
    trained = encode_conversation(tokenizer.backend_tokenizer, messages)
    served = tokenizer.apply_chat_template(messages)["input_ids"]
    assert trained == [*served, tokenizer.eos_token_id]


def test_predicts_english_it_has_never_seen(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert loss_of(model, tokenizer(UNSEEN)["input_ids"]) < MAX_UNSEEN_LOSS


def test_word_order_matters_to_it(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    words = UNSEEN.split()
    shuffled = " ".join(random.Random(0).sample(words, len(words)))
    in_order, out_of_order = (loss_of(model, tokenizer(t)["input_ids"]) for t in (UNSEEN, shuffled))
    assert in_order < out_of_order - 1.0


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_words_and_the_same_each_time(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> None:
    tokens = greedy(model, tokenizer, tokenizer.bos_token + prompt, 60)
    assert tokens == greedy(model, tokenizer, tokenizer.bos_token + prompt, 60)
    vocabulary = {tokenizer.decode([token]).strip().lower() for token in range(len(tokenizer))}
    known = {word for word in vocabulary if len(word) > 1 or word in {"a", "i", "o"}}
    words = re.findall(r"[a-z]+", tokenizer.decode(tokens, skip_special_tokens=True).lower())
    assert len(words) >= 20
    assert len(set(words)) >= 10, words
    assert sum(word in known for word in words) >= 0.8 * len(words), words


@pytest.mark.parametrize("question", ["Hello!", "Who are you?"])
def test_answers_a_greeting_and_ends_its_turn(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str
) -> None:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    *answer, last = greedy(model, tokenizer, prompt, 120)
    assert last == tokenizer.convert_tokens_to_ids("<|end|>")
    assert "I" in tokenizer.decode(answer).split()


def test_long_context_does_not_break_it(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """At the far end of the context the passage costs no more than it may cost at the start."""
    passage = tokenizer(UNSEEN, add_special_tokens=False)["input_ids"]
    room = model.config.max_position_embeddings - len(passage) - 1
    before = tokenizer(UNSEEN_BEFORE, add_special_tokens=False)["input_ids"]
    filler = (before * (room // len(before) + 1))[-room:]
    tokens = torch.tensor([[tokenizer.bos_token_id, *filler, *passage]])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, -len(passage) - 1 : -1]
    assert float(torch.nn.functional.cross_entropy(logits, torch.tensor(passage))) < MAX_UNSEEN_LOSS


def test_conversations_alternate_and_depend_on_the_seed_alone() -> None:
    document = Document(
        source="Emma",
        paragraphs=(
            '"Are you quite sure that you will not come with us?" said she, "for we leave now."',
            '"I am quite sure," he replied; "I thank you, but I will stay here and read."',
            "They left the house at noon, and walked through the garden. The sun was warm.",
        ),
    )
    made = [
        list(DialogueMaker([document] * 20).conversations(random.Random(seed), 30))
        for seed in (1, 1, 2)
    ]
    assert made[0] == made[1] != made[2]
    for conversation in made[0]:
        roles = [message["role"] for message in conversation if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] for message in conversation)
